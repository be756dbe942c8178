// SPDX-License-Identifier: Apache-2.0

import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.FileOutputStream;
import java.io.ObjectOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;

/**
 * Debezium's embedded engine over one MySQL server: DebeziumEvents MYSQL_PORT FILE FOLDER DATABASES [PROPERTY=VALUE...]
 * writes three lines for each event from the beginning of the binlog file on: topic, key and value, where "null" stands
 * for none. It ends when its standard input does.
 */
public class DebeziumEvents {
    private static final String NAME = "shop";

    public static void main(String[] words) throws Exception {
        String folder = words[2];
        beginAt(folder + "/offsets", words[1]);
        PrintStream out = new PrintStream(new FileOutputStream(folder + "/events"), true, StandardCharsets.UTF_8);
        DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine.create(Json.class)
            .using(settings(words, folder))
            .notifying(record -> out.print(
                record.destination() + "\n" + record.key() + "\n" + record.value() + "\n"))
            .using((success, message, problem) -> {
                System.err.println(message + ": " + problem);
                Runtime.getRuntime().halt(1);
            })
            .build();
        new Thread(engine).start();
        System.in.read();
        Runtime.getRuntime().halt(0);
    }

    /** Settings as they ship, with those of the command; it only waits for less time before it looks for news. */
    private static Properties settings(String[] words, String folder) {
        Properties settings = new Properties();
        settings.setProperty("name", NAME);
        settings.setProperty("connector.class", "io.debezium.connector.mysql.MySqlConnector");
        settings.setProperty("database.hostname", "127.0.0.1");
        settings.setProperty("database.port", words[0]);
        settings.setProperty("database.user", "original");
        settings.setProperty("database.password", "original");
        settings.setProperty("database.server.id", "4296");
        settings.setProperty("database.ssl.mode", "disabled");
        settings.setProperty("database.include.list", words[3]);
        settings.setProperty("driver.allowPublicKeyRetrieval", "true");
        settings.setProperty("topic.prefix", NAME);
        settings.setProperty("snapshot.mode", "recovery");
        settings.setProperty("converter.schemas.enable", "true");
        settings.setProperty("poll.interval.ms", "10");
        settings.setProperty("offset.storage", "org.apache.kafka.connect.storage.FileOffsetBackingStore");
        settings.setProperty("offset.storage.file.filename", folder + "/offsets");
        settings.setProperty("offset.flush.interval.ms", "600000");
        settings.setProperty("schema.history.internal", "io.debezium.storage.file.history.FileSchemaHistory");
        settings.setProperty("schema.history.internal.file.filename", folder + "/history");
        for (int i = 4; i < words.length; i++) {
            String[] property = words[i].split("=", 2);
            settings.setProperty(property[0], property[1]);
        }
        return settings;
    }

    /** Leaves the offset that the engine goes on from: a map of bytes, as Kafka Connect's file store keeps it. */
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
