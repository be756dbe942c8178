# SPDX-License-Identifier: Apache-2.0
"""The properties of Canal's canal.properties and instance.properties.

The names are from Canal's wiki (github.com/alibaba/canal/wiki/AdminGuide) and from the configuration files
that Canal ships.
"""

from penstock.migrate.kafka_client import options_below
from penstock.migrate.report import Rule, carried, changed, missing, needless

_ADMIN = needless("there is no administration server: `penstock status` and the HTTP port show everything")
_RING = needless("memory is bounded by log.memory_bytes")
_META = needless("checkpoints are written within a second, to the coordination store")
_TSDB = needless("definitions are kept with the log, by position")
_KEYSTORE = missing("write the authorities to a PEM file, and add ?ssl_ca=FILE to the source's URL")
_ROCKET = needless("only for serverMode rocketMQ")
_RABBIT = needless("only for serverMode rabbitMQ")
_PULSAR = needless("only for serverMode pulsarMQ")
_NETWORK = needless("Penstock sizes its own buffers")

REFERENCE: dict[str, Rule] = {
    # The server.
    "canal.ip": carried("listen.canal"),
    "canal.port": carried("listen.canal"),
    "canal.register.ip": needless("clients have the addresses of the daemons"),
    "canal.metrics.pull.port": needless("metrics are at /metrics of listen.http"),
    "canal.id": needless("daemons need no number"),
    "canal.user": carried("access"),
    "canal.passwd": changed("access: the hash cannot be reversed, so the password is read from a file"),
    "canal.admin.*": _ADMIN,
    **{f"canal.admin.{name}": _ADMIN for name in ("manager", "port", "user", "passwd")},
    **{f"canal.admin.register.{name}": _ADMIN for name in ("auto", "cluster", "name")},
    "canal.zkServers": needless("daemons share a store of their own: see coordination"),
    "canal.zookeeper.flush.period": _META,
    "canal.withoutNetty": needless("the Canal port is on whenever listen.canal is set"),
    "canal.serverMode": carried("listen.canal, or the sink of pipelines"),
    "canal.file.data.dir": needless("where Canal keeps its cursors: they were read there"),
    "canal.file.flush.period": _META,
    "canal.conf.dir": needless("the folder that was read"),
    "canal.destinations": carried("instances"),
    "canal.auto.scan": needless("restart the daemon after a change of its settings"),
    "canal.auto.scan.interval": needless("restart the daemon after a change of its settings"),
    "canal.auto.reset.latest.pos.mode": changed("fail_on_data_loss"),
    "canal.instance.global.mode": missing("settings are read from files", "spring"),
    "canal.instance.global.lazy": needless("every instance starts with the daemon"),
    "canal.instance.global.manager.address": _ADMIN,
    "canal.instance.global.spring.xml": needless("the definition of Canal's own components"),
    "canal.instance.*.spring.xml": needless("the definition of Canal's own components"),
    "canal.instance.*.mode": missing("settings are read from files", "spring"),
    "canal.instance.*.lazy": needless("every instance starts with the daemon"),
    "canal.aliyun.*": missing("Penstock does not read logs from OSS"),
    **{
        f"canal.aliyun.{name}": missing("Penstock does not read logs from OSS")
        for name in ("accessKey", "secretKey", "uid", "accesskey", "secretkey")
    },
    # Properties about the server of an instance.
    "canal.instance.destination": carried("instances"),
    "canal.instance.master.address": carried("source"),
    "canal.instance.standby.address": carried("servers"),
    "canal.instance.dbUsername": carried("source"),
    "canal.instance.dbPassword": carried("password_file"),
    "canal.instance.enableDruid": needless("the password is kept in a file"),
    "canal.instance.pwdPublicKey": needless("only with enableDruid"),
    "canal.instance.defaultDatabaseName": needless("a session needs no database"),
    "canal.instance.connectionCharset": needless("text is decoded with its column's character set"),
    "canal.instance.mysql.slaveId": carried("server_id"),
    "canal.instance.gtidon": carried("canal_gtid"),
    "canal.instance.multi.stream.on": missing("PolarDB-X is not a source", "false"),
    "canal.instance.master.sslMode": carried("source, ?ssl_mode="),
    "canal.instance.master.tlsVersions": needless("TLS 1.2 and later"),
    "canal.instance.master.trustCertificateKeyStore*": _KEYSTORE,
    "canal.instance.master.clientCertificateKeyStore*": _KEYSTORE,
    "canal.instance.standby.sslMode": needless("the servers of a cluster share one mode"),
    "canal.instance.standby.tlsVersions": needless("TLS 1.2 and later"),
    "canal.instance.standby.trustCertificateKeyStore*": _KEYSTORE,
    "canal.instance.standby.clientCertificateKeyStore*": _KEYSTORE,
    "canal.instance.rds.*": missing("Penstock does not read logs from OSS"),
    "canal.instance.master1.*": missing("one instance for each cluster: write one more under instances"),
    "canal.instance.master2.*": missing("one instance for each cluster: write one more under instances"),
    "canal.instance.standby1.*": missing("one instance for each cluster: write one more under instances"),
    "canal.instance.standby2.*": missing("one instance for each cluster: write one more under instances"),
    # Properties that determine where an instance starts.
    **{
        f"canal.instance.{server}.{name}": rule
        for server, rule in (
            ("master", carried("start")),
            ("standby", needless("another server of the cluster is followed by GTID set")),
        )
        for name in ("journal.name", "position", "timestamp", "gtid")
    },
    # Properties about the tables of an instance.
    "canal.instance.filter.regex": carried("tables, with canal_filters"),
    "canal.instance.filter.black.regex": carried("exclude_tables, with canal_filters"),
    "canal.instance.filter.field": missing(
        "Canal clients get every column: use a pipeline with a `map` step"
    ),
    "canal.instance.filter.black.field": missing(
        "Canal clients get every column: use a pipeline with a `map` step"
    ),
    "canal.instance.filter.druid.ddl": needless("Penstock has one reader of DDL"),
    "canal.instance.filter.query.dcl": missing("statements are sent", "false"),
    "canal.instance.filter.query.dml": missing("statements are sent", "false"),
    "canal.instance.filter.query.ddl": missing("definitions are sent", "false"),
    "canal.instance.filter.table.error": missing(
        "a table that does not fit its definition stops the reader", "false"
    ),
    "canal.instance.filter.rows": missing("rows are sent", "false"),
    "canal.instance.filter.transaction.entry": missing("begin and end of transactions are sent", "false"),
    "canal.instance.filter.dml.insert": missing("Canal clients get every change", "false"),
    "canal.instance.filter.dml.update": missing("Canal clients get every change", "false"),
    "canal.instance.filter.dml.delete": missing("Canal clients get every change", "false"),
    "canal.instance.get.ddl.isolation": missing("a batch may have definitions and rows", "false"),
    "canal.instance.binlog.format": needless("`penstock check` reports the server's format"),
    "canal.instance.binlog.image": needless("every row image is read"),
    "canal.instance.transaction.size": needless("large transactions are sent in several batches"),
    "canal.instance.fallbackIntervalInSeconds": needless("fail-over continues by GTID, without going back"),
    "canal.instance.detecting.*": needless("a silent server is detected by its heartbeats"),
    "canal.instance.detecting.enable": needless("fail-over is on if there are several servers"),
    "canal.instance.detecting.sql": needless("the source is never written to"),
    "canal.instance.memory.*": _RING,
    **{f"canal.instance.memory.{name}": _RING for name in ("buffer.size", "buffer.memunit", "batch.mode")},
    "canal.instance.memory.rawEntry": _RING,
    "canal.instance.network.*": _NETWORK,
    **{
        f"canal.instance.network.{name}": _NETWORK
        for name in ("receiveBufferSize", "sendBufferSize", "soTimeout")
    },
    "canal.instance.parser.*": needless("the kernel decodes in threads of its own"),
    "canal.instance.tsdb.*": _TSDB,
    **{
        f"canal.instance.tsdb.{name}": _TSDB
        for name in (
            "enable",
            "dir",
            "url",
            "dbUsername",
            "dbPassword",
            "snapshot.interval",
            "snapshot.expire",
        )
    },
    # Messages.
    "canal.mq.topic": carried("sink.kafka.topic"),
    "canal.mq.dynamicTopic": carried("sinks"),
    "canal.mq.partition": changed("tables without a key have one partition each"),
    "canal.mq.partitionsNum": carried("sink.kafka.partitions"),
    "canal.mq.partitionHash": changed("sink.kafka.partition_by, by the hash of Kafka's own producers"),
    "canal.mq.enableDynamicQueuePartition": needless("the number of partitions is always the topic's own"),
    "canal.mq.dynamicTopicPartitionNum": missing("new topics have sink.kafka.partitions"),
    "canal.mq.database.hash": missing("the partition does not depend on the database", "true"),
    "canal.mq.flatMessage": carried("sink.kafka.format"),
    "canal.mq.canalBatchSize": needless("see batch.bytes"),
    "canal.mq.canalGetTimeout": needless("see batch.interval"),
    "canal.mq.accessChannel": missing("there are no message traces of Aliyun's", "local"),
    "canal.mq.send.thread.size": needless("see batch.parts"),
    "canal.mq.build.thread.size": needless("see batch.parts"),
    "canal.mq.servers": carried("sink.kafka.servers"),
    "canal.mq.*": missing("a property of Canal before 1.1.5: write it under its present name"),
    **options_below("kafka."),
    "rocketmq.*": _ROCKET,
    "rabbitmq.*": _RABBIT,
    "pulsarmq.*": _PULSAR,
}
