// SPDX-License-Identifier: Apache-2.0
// Reads all messages of a topic as RocketMQ's own consumers do: java RocketReader.java NAMESERVER TOPIC TAGS. Each
// line of the output that begins with "message" is one, in the order of its queue.

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

public class RocketReader {
    public static void main(String[] words) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("readers");
        consumer.setNamesrvAddr(words[0]);
        consumer.start();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(words[1])) {
            long end = consumer.maxOffset(queue);
            for (long offset = consumer.minOffset(queue); offset < end; ) {
                PullResult pulled = consumer.pull(queue, words[2], offset, 1000);
                List<MessageExt> found =
                        pulled.getPullStatus() == PullStatus.FOUND ? pulled.getMsgFoundList() : new ArrayList<>();
                for (MessageExt message : found) {
                    System.out.println(lineOf(queue, message));
                }
                if (pulled.getNextBeginOffset() <= offset) {
                    throw new IllegalStateException(queue + " does not end: " + pulled);
                }
                offset = pulled.getNextBeginOffset();
            }
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    private static String lineOf(MessageQueue queue, MessageExt message) {
        List<String> fields = new ArrayList<>();
        fields.add("message");
        fields.add(queue.getQueueId() + "");
        fields.add(message.getQueueOffset() + "");
        fields.add(base64(message.getBody()));
        for (Map.Entry<String, String> property : new TreeMap<>(message.getProperties()).entrySet()) {
            fields.add(base64(property.getKey().getBytes(StandardCharsets.UTF_8)));
            fields.add(base64(property.getValue().getBytes(StandardCharsets.UTF_8)));
        }
        return String.join("\t", fields);
    }

    private static String base64(byte[] bytes) {
        return Base64.getEncoder().encodeToString(bytes);
    }
}
