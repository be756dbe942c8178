// SPDX-License-Identifier: Apache-2.0

import com.alibaba.otter.canal.instance.manager.CanalInstanceWithManager;
import com.alibaba.otter.canal.instance.manager.model.Canal;
import com.alibaba.otter.canal.instance.manager.model.CanalParameter;
import com.alibaba.otter.canal.server.embedded.CanalServerWithEmbedded;
import com.alibaba.otter.canal.server.netty.CanalServerWithNetty;
import java.net.InetSocketAddress;
import java.util.List;

/**
 * Canal's own server over one MySQL server: CanalPeer PORT MYSQL_PORT FILE FILTER prints "ready", and serves the
 * destination "bench" from the beginning of the file. It uses its default settings, with storage in memory.
 */
public class CanalPeer {
    public static void main(String[] words) throws Exception {
        CanalParameter settings = new CanalParameter();
        settings.setMetaMode(CanalParameter.MetaMode.MEMORY);
        settings.setHaMode(CanalParameter.HAMode.HEARTBEAT);
        settings.setIndexMode(CanalParameter.IndexMode.MEMORY);
        settings.setStorageMode(CanalParameter.StorageMode.MEMORY);
        settings.setMemoryStorageBufferSize(16 * 1024);
        settings.setSourcingType(CanalParameter.SourcingType.MYSQL);
        settings.setDbAddresses(List.of(new InetSocketAddress("127.0.0.1", Integer.parseInt(words[1]))));
        settings.setDbUsername("canal");
        settings.setDbPassword("canal");
        settings.setPositions(List.of("{\"journalName\":\"" + words[2] + "\",\"position\":4,\"timestamp\":0}"));
        settings.setSlaveId(4295L);
        settings.setDefaultConnectionTimeoutInSeconds(30);
        settings.setConnectionCharset("UTF-8");
        settings.setDetectingEnable(false);
        Canal canal = new Canal();
        canal.setId(1L);
        canal.setName("bench");
        canal.setCanalParameter(settings);
        CanalServerWithEmbedded embedded = CanalServerWithEmbedded.instance();
        embedded.setCanalInstanceGenerator(destination -> new CanalInstanceWithManager(canal, words[3]));
        CanalServerWithNetty server = CanalServerWithNetty.instance();
        server.setEmbeddedServer(embedded);
        server.setIp("127.0.0.1");
        server.setPort(Integer.parseInt(words[0]));
        server.start();
        embedded.start("bench");
        System.out.println("ready");
        System.out.flush();
        Thread.currentThread().join();
    }
}
