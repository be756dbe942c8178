// SPDX-License-Identifier: Apache-2.0
// Reads messages as a consumer of Debezium's topics with Kafka Connect's Avro converter does. Each line of the input
// is {"connect": a Connect schema, "avro": a schema of the registry, "record": base64 of a record}. The output has
// the schema that the converter makes of the Connect schema, and the record as Connect's JSON converter shows it.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.apicurio.registry.utils.converter.avro.AvroData;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.kafka.connect.data.SchemaAndValue;
import org.apache.kafka.connect.json.JsonConverter;

public class AvroOracle {
    public static void main(String[] words) throws Exception {
        ObjectMapper mapper = new ObjectMapper();
        AvroData avroData = new AvroData(1000);
        JsonConverter plain = new JsonConverter();
        plain.configure(Map.of("schemas.enable", false), false);
        JsonConverter described = new JsonConverter();
        described.configure(Map.of("schemas.enable", true), false);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode request = mapper.readTree(line);
            ObjectNode answer = JsonNodeFactory.instance.objectNode();
            answer.put("avro", avroData.fromConnectSchema(described.asConnectSchema(request.get("connect"))).toString());
            Schema schema = new Schema.Parser().parse(request.get("avro").asText());
            BinaryDecoder decoder =
                    DecoderFactory.get().binaryDecoder(Base64.getDecoder().decode(request.get("record").asText()), null);
            Object record = new GenericDatumReader<Object>(schema).read(null, decoder);
            if (!decoder.isEnd()) {
                throw new IllegalArgumentException("bytes after the record");
            }
            SchemaAndValue value = avroData.toConnectData(schema, record);
            byte[] shown = plain.fromConnectData("topic", value.schema(), value.value());
            answer.set("value", mapper.readTree(shown));
            System.out.println(mapper.writeValueAsString(answer));
        }
    }
}
