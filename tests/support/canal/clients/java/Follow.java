// SPDX-License-Identifier: Apache-2.0

import com.alibaba.otter.canal.client.CanalConnector;
import com.alibaba.otter.canal.client.CanalConnectors;
import com.alibaba.otter.canal.client.impl.SimpleCanalConnector;
import com.alibaba.otter.canal.protocol.CanalEntry.Column;
import com.alibaba.otter.canal.protocol.CanalEntry.Entry;
import com.alibaba.otter.canal.protocol.CanalEntry.EntryType;
import com.alibaba.otter.canal.protocol.CanalEntry.RowChange;
import com.alibaba.otter.canal.protocol.CanalEntry.RowData;
import com.alibaba.otter.canal.protocol.Message;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.TimeUnit;

/**
 * Follows a destination with Canal's own client. Prints each entry as a line of JSON, up to a row of a table "stop";
 * or, with a number of entries behind the filter, drains and acknowledges so many and prints the seconds it took.
 * The first word is a port of this machine, or the hosts of the ZooKeeper ensemble in which to find the server.
 */
public class Follow {
    public static void main(String[] words) throws Exception {
        CanalConnector connector = connector(words);
        if (words.length > 5) {
            ((SimpleCanalConnector) connector).setLazyParseEntry(words.length > 6);
        }
        connector.connect();
        connector.subscribe(words[4]);
        connector.rollback();
        if (words.length > 5) {
            drain(connector, Long.parseLong(words[5]));
        } else {
            follow(connector);
        }
        connector.disconnect();
        System.exit(0);
    }

    private static CanalConnector connector(String[] words) {
        if (words[0].contains(":")) {
            return CanalConnectors.newClusterConnector(words[0], words[1], words[2], words[3]);
        }
        InetSocketAddress address = new InetSocketAddress("127.0.0.1", Integer.parseInt(words[0]));
        return CanalConnectors.newSingleConnector(address, words[1], words[2], words[3]);
    }

    private static void follow(CanalConnector connector) throws Exception {
        PrintStream output = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        boolean stop = false;
        while (!stop) {
            Message message = connector.getWithoutAck(1000, 200L, TimeUnit.MILLISECONDS);
            if (message.getId() == -1) {
                continue;
            }
            for (Entry entry : message.getEntries()) {
                output.println(tell(entry));
                stop |= entry.getHeader().getTableName().equals("stop") && entry.getHeader().getEventType().getNumber() == 1;
            }
            output.flush();
            connector.ack(message.getId());
        }
    }

    private static void drain(CanalConnector connector, long wanted) {
        long entries = 0;
        long begun = System.nanoTime();
        while (entries < wanted) {
            Message message = connector.getWithoutAck(4000);
            if (message.getId() == -1) {
                continue;
            }
            entries += message.isRaw() ? message.getRawEntries().size() : message.getEntries().size();
            connector.ack(message.getId());
        }
        System.out.println((System.nanoTime() - begun) / 1e9);
    }

    private static String tell(Entry entry) throws Exception {
        String event = "";
        String sql = "";
        StringBuilder rows = new StringBuilder();
        if (entry.getEntryType() == EntryType.ROWDATA) {
            RowChange change = RowChange.parseFrom(entry.getStoreValue());
            event = change.getEventType().name();
            sql = change.getSql();
            for (RowData row : change.getRowDatasList()) {
                rows.append(rows.length() == 0 ? "" : ",");
                rows.append("{\"before\":").append(columns(row.getBeforeColumnsList()));
                rows.append(",\"after\":").append(columns(row.getAfterColumnsList())).append("}");
            }
        }
        return "{\"entry\":" + text(entry.getEntryType().name()) + ",\"event\":" + text(event)
            + ",\"schema\":" + text(entry.getHeader().getSchemaName())
            + ",\"table\":" + text(entry.getHeader().getTableName())
            + ",\"sql\":" + text(sql) + ",\"rows\":[" + rows + "]}";
    }

    private static String columns(List<Column> columns) {
        StringBuilder found = new StringBuilder("{");
        for (Column column : columns) {
            found.append(found.length() == 1 ? "" : ",").append(text(column.getName()));
            found.append(":{\"value\":").append(column.getIsNull() ? "null" : text(column.getValue()));
            found.append(",\"sqlType\":").append(column.getSqlType());
            found.append(",\"mysqlType\":").append(text(column.getMysqlType()));
            found.append(",\"isKey\":").append(column.getIsKey());
            found.append(",\"updated\":").append(column.getUpdated()).append("}");
        }
        return found.append("}").toString();
    }

    private static String text(String value) {
        StringBuilder found = new StringBuilder("\"");
        for (char one : value.toCharArray()) {
            if (one == '"' || one == '\\' || one < 32 || one > 126) {
                found.append(String.format("\\u%04x", (int) one));
            } else {
                found.append(one);
            }
        }
        return found.append("\"").toString();
    }
}
