// SPDX-License-Identifier: Apache-2.0

import com.github.shyiko.mysql.binlog.BinaryLogClient;
import com.github.shyiko.mysql.binlog.event.DeleteRowsEventData;
import com.github.shyiko.mysql.binlog.event.Event;
import com.github.shyiko.mysql.binlog.event.EventData;
import com.github.shyiko.mysql.binlog.event.EventHeaderV4;
import com.github.shyiko.mysql.binlog.event.TableMapEventData;
import com.github.shyiko.mysql.binlog.event.UpdateRowsEventData;
import com.github.shyiko.mysql.binlog.event.WriteRowsEventData;
import com.github.shyiko.mysql.binlog.network.SSLMode;
import java.util.HashSet;
import java.util.Set;

/**
 * Reads every row of a server's binlog file with mysql-binlog-connector-java: ConnectorDrain PORT FILE END SECONDS
 * prints "inserts updates deletes offset". SECONDS 0 reads to the END of the file.
 */
public class ConnectorDrain {
    private static long inserts, updates, deletes, offset;
    private static final Set<Long> ours = new HashSet<>();

    public static void main(String[] words) throws Exception {
        long end = Long.parseLong(words[2]);
        long seconds = Long.parseLong(words[3]);
        long deadline = seconds == 0 ? Long.MAX_VALUE : System.nanoTime() + seconds * 1_000_000_000L;
        BinaryLogClient client = new BinaryLogClient("127.0.0.1", Integer.parseInt(words[0]), "root", "");
        client.setServerId(4294);
        client.setSSLMode(SSLMode.DISABLED);
        client.setBinlogFilename(words[1]);
        client.setBinlogPosition(4);
        client.setKeepAlive(false);
        client.registerEventListener(event -> {
            take(event);
            if (offset >= end || System.nanoTime() > deadline) {
                System.out.println(inserts + " " + updates + " " + deletes + " " + offset);
                System.out.flush();
                Runtime.getRuntime().halt(0);
            }
        });
        client.connect();
    }

    private static void take(Event event) {
        EventHeaderV4 header = event.getHeader();
        EventData data = event.getData();
        if (header.getNextPosition() > 0) {
            offset = header.getNextPosition();
        }
        if (data instanceof TableMapEventData table && table.getDatabase().equals("bench")) {
            ours.add(table.getTableId());
        } else if (data instanceof WriteRowsEventData rows && ours.contains(rows.getTableId())) {
            inserts += rows.getRows().size();
        } else if (data instanceof UpdateRowsEventData rows && ours.contains(rows.getTableId())) {
            updates += rows.getRows().size();
        } else if (data instanceof DeleteRowsEventData rows && ours.contains(rows.getTableId())) {
            deletes += rows.getRows().size();
        }
    }
}
