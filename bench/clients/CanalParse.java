// SPDX-License-Identifier: Apache-2.0

import com.alibaba.otter.canal.client.impl.SimpleCanalConnector;
import com.alibaba.otter.canal.protocol.CanalEntry.Entry;
import com.alibaba.otter.canal.protocol.CanalEntry.EntryType;
import com.alibaba.otter.canal.protocol.Message;
import com.google.protobuf.ByteString;
import java.lang.management.ManagementFactory;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;

/**
 * What Canal's own client can parse at most: CanalParse PORT DESTINATION FILTER TRANSACTIONS receives entries
 * without parsing them, then parses them from memory as the client does, for some seconds, in one thread. It
 * prints "transactions seconds" of the CPU time of that thread.
 */
public class CanalParse {
    private static final long NANOSECONDS = 4_000_000_000L;

    public static void main(String[] words) throws Exception {
        InetSocketAddress address = new InetSocketAddress("127.0.0.1", Integer.parseInt(words[0]));
        SimpleCanalConnector connector = new SimpleCanalConnector(address, "", "", words[1]);
        connector.setLazyParseEntry(true);
        connector.connect();
        connector.subscribe(words[2]);
        connector.unsubscribe();
        connector.subscribe(words[2]);
        long wanted = Long.parseLong(words[3]);
        List<ByteString> entries = new ArrayList<>();
        long transactions = 0;
        while (transactions < wanted) {
            Message message = connector.getWithoutAck(4096, 20L, TimeUnit.MILLISECONDS);
            if (message.getId() == -1) {
                continue;
            }
            for (ByteString raw : message.getRawEntries()) {
                entries.add(raw);
                transactions += ends(Entry.parseFrom(raw));
            }
            connector.ack(message.getId());
        }
        long parsed = 0;
        long begun = ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime();
        long used = 0;
        while (used < NANOSECONDS) {
            for (ByteString raw : entries) {
                parsed += ends(Entry.parseFrom(raw));
            }
            used = ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime() - begun;
        }
        System.out.printf("%d %.6f%n", parsed, used / 1e9);
        System.exit(0);
    }

    private static int ends(Entry entry) {
        return entry.getEntryType() == EntryType.TRANSACTIONEND ? 1 : 0;
    }
}
