// SPDX-License-Identifier: Apache-2.0

import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.BufferedOutputStream;
import java.io.FileOutputStream;
import java.io.ObjectOutputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;

/**
 * Debezium's embedded engine over one MySQL server: DebeziumLines MYSQL_PORT FILE TABLES ROWS FOLDER writes each change
 * as a line of JSON to FOLDER/changes.json, from the beginning of the binlog file on, and ends after ROWS changes
 * with "CHANGES SECONDS", the clock running from the first change.
 */
public class DebeziumLines {
    private static final String NAME = "bench";

    public static void main(String[] words) throws Exception {
        String folder = words[4];
        long wanted = Long.parseLong(words[3]);
        beginAt(folder + "/offsets", words[1]);
        CountDownLatch done = new CountDownLatch(1);
        long[] seen = new long[1];
        long[] began = new long[1];
        OutputStream out = new BufferedOutputStream(new FileOutputStream(folder + "/changes.json"), 1 << 20);
        DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine.create(Json.class)
            .using(settings(words[0], words[2], folder))
            .notifying((records, committer) -> {
                for (ChangeEvent<String, String> record : records) {
                    if (record.value() != null && record.key() != null && record.destination().split("\\.").length == 3) {
                        if (seen[0]++ == 0) {
                            began[0] = System.nanoTime();
                        }
                        try {
                            out.write(record.value().getBytes(StandardCharsets.UTF_8));
                            out.write('\n');
                        } catch (java.io.IOException problem) {
                            throw new RuntimeException(problem);
                        }
                    }
                    committer.markProcessed(record);
                }
                committer.markBatchFinished();
                if (seen[0] >= wanted) {
                    done.countDown();
                }
            })
            .using((success, message, problem) -> {
                if (!success) {
                    System.err.println(message + ": " + problem);
                    System.exit(1);
                }
            })
            .build();
        Thread thread = new Thread(engine);
        thread.start();
        done.await();
        double seconds = (System.nanoTime() - began[0]) / 1e9;
        out.flush();
        System.out.println(seen[0] + " " + seconds);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    /** Default settings, except for larger batches, no tombstones and no schemas in the lines. */
    private static Properties settings(String port, String tables, String folder) {
        Properties settings = new Properties();
        settings.setProperty("name", NAME);
        settings.setProperty("connector.class", "io.debezium.connector.mysql.MySqlConnector");
        settings.setProperty("database.hostname", "127.0.0.1");
        settings.setProperty("database.port", port);
        settings.setProperty("database.user", "debezium");
        settings.setProperty("database.password", "debezium");
        settings.setProperty("database.server.id", "4296");
        settings.setProperty("database.ssl.mode", "disabled");
        settings.setProperty("driver.allowPublicKeyRetrieval", "true");
        settings.setProperty("topic.prefix", NAME);
        settings.setProperty("table.include.list", tables);
        settings.setProperty("snapshot.mode", "recovery");
        settings.setProperty("include.schema.changes", "false");
        settings.setProperty("tombstones.on.delete", "false");
        settings.setProperty("converter.schemas.enable", "false");
        settings.setProperty("offset.storage", "org.apache.kafka.connect.storage.FileOffsetBackingStore");
        settings.setProperty("offset.storage.file.filename", folder + "/offsets");
        settings.setProperty("offset.flush.interval.ms", "10000");
        settings.setProperty("schema.history.internal", "io.debezium.storage.file.history.FileSchemaHistory");
        settings.setProperty("schema.history.internal.file.filename", folder + "/history");
        settings.setProperty("max.batch.size", "8192");
        settings.setProperty("max.queue.size", "32768");
        return settings;
    }

    /** Writes the offset at which the engine resumes: a map of bytes, the format of Kafka Connect's file store. */
    private static void beginAt(String path, String file) throws Exception {
        Map<byte[], byte[]> offsets = new HashMap<>();
        String key = "[\"" + NAME + "\",{\"server\":\"" + NAME + "\"}]";
        String value = "{\"file\":\"" + file + "\",\"pos\":4,\"gtids\":\"00000000-0000-0000-0000-000000000001:1\"}";
        offsets.put(key.getBytes(StandardCharsets.UTF_8), value.getBytes(StandardCharsets.UTF_8));
        try (ObjectOutputStream out = new ObjectOutputStream(new FileOutputStream(path))) {
            out.writeObject(offsets);
        }
    }
}
