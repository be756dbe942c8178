// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONWriter;
import com.alibaba.otter.canal.connector.core.producer.MQMessageUtils;
import com.alibaba.otter.canal.instance.manager.CanalInstanceWithManager;
import com.alibaba.otter.canal.instance.manager.model.Canal;
import com.alibaba.otter.canal.instance.manager.model.CanalParameter;
import com.alibaba.otter.canal.protocol.ClientIdentity;
import com.alibaba.otter.canal.protocol.FlatMessage;
import com.alibaba.otter.canal.protocol.Message;
import com.alibaba.otter.canal.server.embedded.CanalServerWithEmbedded;
import com.google.protobuf.ByteString;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/**
 * Canal's own server over one MySQL server: CanalEvents MYSQL_PORT FILE FOLDER FILTER writes a line for each entry from
 * the beginning of the binlog file on, in base64, and a line for each flat message that Canal makes of the entries for
 * queues. It ends when its standard input does.
 */
public class CanalEvents {
    private static final String NAME = "shop";

    public static void main(String[] words) throws Exception {
        String folder = words[2];
        PrintStream entries = new PrintStream(new FileOutputStream(folder + "/entries"), true, StandardCharsets.UTF_8);
        PrintStream flat = new PrintStream(new FileOutputStream(folder + "/flat"), true, StandardCharsets.UTF_8);
        Canal canal = new Canal();
        canal.setId(1L);
        canal.setName(NAME);
        canal.setCanalParameter(settings(words[0], words[1]));
        CanalServerWithEmbedded server = CanalServerWithEmbedded.instance();
        server.setCanalInstanceGenerator(destination -> new CanalInstanceWithManager(canal, words[3]));
        server.start();
        server.start(NAME);
        ClientIdentity client = new ClientIdentity(NAME, (short) 1001, words[3]);
        server.subscribe(client);
        ThreadPoolExecutor builders =
            new ThreadPoolExecutor(1, 1, 1, TimeUnit.MINUTES, new ArrayBlockingQueue<>(64), new ThreadPoolExecutor.CallerRunsPolicy());
        Thread reader = new Thread(() -> {
            while (true) {
                Message message = server.getWithoutAck(client, 100, 10L, TimeUnit.MILLISECONDS);
                if (message.getId() == -1) {
                    continue;
                }
                for (ByteString entry : message.getRawEntries()) {
                    entries.print(Base64.getEncoder().encodeToString(entry.toByteArray()) + "\n");
                }
                MQMessageUtils.EntryRowData[] rows = MQMessageUtils.buildMessageData(message, builders);
                for (FlatMessage one : MQMessageUtils.messageConverter(rows, message.getId())) {
                    flat.print(JSON.toJSONString(one, JSONWriter.Feature.WriteNulls) + "\n");
                }
                server.ack(client, message.getId());
            }
        });
        reader.setUncaughtExceptionHandler((thread, problem) -> {
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        });
        reader.start();
        System.in.read();
        Runtime.getRuntime().halt(0);
    }

    /** Settings as they ship, in memory. */
    private static CanalParameter settings(String port, String file) {
        CanalParameter settings = new CanalParameter();
        settings.setMetaMode(CanalParameter.MetaMode.MEMORY);
        settings.setHaMode(CanalParameter.HAMode.HEARTBEAT);
        settings.setIndexMode(CanalParameter.IndexMode.MEMORY);
        settings.setStorageMode(CanalParameter.StorageMode.MEMORY);
        settings.setMemoryStorageBufferSize(16 * 1024);
        settings.setSourcingType(CanalParameter.SourcingType.MYSQL);
        settings.setDbAddresses(List.of(new InetSocketAddress("127.0.0.1", Integer.parseInt(port))));
        settings.setDbUsername("original");
        settings.setDbPassword("original");
        settings.setPositions(List.of("{\"journalName\":\"" + file + "\",\"position\":4,\"timestamp\":0}"));
        settings.setSlaveId(4295L);
        settings.setDefaultConnectionTimeoutInSeconds(30);
        settings.setConnectionCharset("UTF-8");
        settings.setDetectingEnable(false);
        return settings;
    }
}
