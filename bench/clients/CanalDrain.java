// SPDX-License-Identifier: Apache-2.0

import com.alibaba.otter.canal.client.CanalConnector;
import com.alibaba.otter.canal.client.CanalConnectors;
import com.alibaba.otter.canal.protocol.CanalEntry.Entry;
import com.alibaba.otter.canal.protocol.CanalEntry.EntryType;
import com.alibaba.otter.canal.protocol.CanalEntry.Pair;
import com.alibaba.otter.canal.protocol.Message;
import java.net.InetSocketAddress;
import java.util.concurrent.TimeUnit;

/**
 * Drains a destination with Canal's own client: CanalDrain PORT DESTINATION FILTER ROWS prints
 * "rows entries bytes batches seconds". The client parses the entries; rows are counted by their headers, and
 * bytes without headers, because to compute the size of a header costs more than to parse it.
 */
public class CanalDrain {
    public static void main(String[] words) {
        InetSocketAddress address = new InetSocketAddress("127.0.0.1", Integer.parseInt(words[0]));
        CanalConnector connector = CanalConnectors.newSingleConnector(address, words[1], "", "");
        connector.connect();
        // Resets the position of an earlier run, so that every run starts at the first row.
        connector.subscribe(words[2]);
        connector.unsubscribe();
        connector.subscribe(words[2]);
        long wanted = Long.parseLong(words[3]);
        long rows = 0, entries = 0, bytes = 0, batches = 0;
        long begun = System.nanoTime();
        while (rows < wanted) {
            Message message = connector.getWithoutAck(4096, 20L, TimeUnit.MILLISECONDS);
            if (message.getId() == -1) {
                continue;
            }
            for (Entry entry : message.getEntries()) {
                entries++;
                bytes += entry.getStoreValue().size();
                if (entry.getEntryType() != EntryType.ROWDATA) {
                    continue;
                }
                for (Pair pair : entry.getHeader().getPropsList()) {
                    if (pair.getKey().equals("rowsCount")) {
                        rows += Long.parseLong(pair.getValue());
                    }
                }
            }
            connector.ack(message.getId());
            batches++;
        }
        System.out.printf("%d %d %d %d %.6f%n", rows, entries, bytes, batches, (System.nanoTime() - begun) / 1e9);
        System.exit(0);
    }
}
