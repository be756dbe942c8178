# SPDX-License-Identifier: Apache-2.0
"""The outcome of each property of a Drainer's configuration and checkpoint.

The names are those of TiDB-Binlog's drainer.toml (docs.pingcap.com, "TiDB Binlog Configuration File"), each
prefixed with the name of its section.
"""

from penstock.migrate.report import Rule, carried, missing, needless

_KAFKA_CLIENT = needless("librdkafka needs no such bound: see sink.kafka.options")
_ORACLE = missing("no sink writes to Oracle")
_PLUGIN = missing("a program of its own: read the changes with penstock.read_binlog")
_CHECKPOINT = needless("the position is in the instance's log, and batch numbers are in the target")

REFERENCE: dict[str, Rule] = {
    "addr": carried("tidb.drainer.listen"),
    "advertise-addr": carried("tidb.drainer.advertise"),
    "node-id": carried("tidb.drainer.node_id"),
    "pd-urls": carried("source"),
    "compressor": carried("tidb.drainer.compress"),
    "initial-commit-ts": carried("start"),
    "data-dir": needless("the log has a folder of its own: log.folder"),
    "detect-interval": needless("the registry is listed every five seconds"),
    "synced-check-time": needless("`penstock status` says whether the instance has caught up"),
    "cache-binlog-count": needless("memory is bounded by tidb.drainer.buffer_bytes"),
    "log-file": needless("log lines go to standard error"),
    "log-level": needless("log lines have one level"),
    "security.ssl-ca": carried("tidb.tls.ca"),
    "security.ssl-cert": carried("tidb.tls.cert"),
    "security.ssl-key": carried("tidb.tls.key"),
    "security.cert-allowed-cn": carried("tidb.tls.allowed_names"),
    "syncer.db-type": carried("sink"),
    "syncer.ignore-schemas": carried("source.exclude"),
    "syncer.ignore-table": carried("source.exclude"),
    "syncer.replicate-do-db": carried("source.tables"),
    "syncer.replicate-do-table": carried("source.tables"),
    "syncer.ignore-txn-commit-ts": carried("a `filter` step"),
    "syncer.sync-ddl": carried("schema_changes, or statements of the sink"),
    "syncer.worker-count": carried("sink.mysql.connections"),
    "syncer.enable-dispatch": carried("sink.mysql.apply"),
    "syncer.disable-dispatch": carried("sink.mysql.apply"),
    "syncer.loopback-control": carried("sink.mysql.drainer_channel and loops.drainer_channels"),
    "syncer.channel-id": carried("sink.mysql.drainer_channel and loops.drainer_channels"),
    "syncer.safe-mode": needless("every write is repeatable"),
    "syncer.enable-detect": needless("rows that share a value of a key are always written in order"),
    "syncer.disable-detect": needless("rows that share a value of a key are always written in order"),
    "syncer.txn-batch": needless("statements are cut by sink.mysql.statement_bytes"),
    "syncer.sql-mode": needless("definitions come from the DDL jobs, and no statement is parsed"),
    "syncer.load-schema-snapshot": needless("definitions come from the DDL jobs"),
    "syncer.case-sensitive": needless("only with table-migrate-rule and binlog-filter-rule"),
    "syncer.table-migrate-rule": missing("write a `route` step"),
    "syncer.binlog-filter-rule.*": missing("write `filter` steps"),
    "syncer.relay.*": needless("the instance keeps a log of everything that it received"),
    "syncer.plugin-path": _PLUGIN,
    "syncer.plugin-name": _PLUGIN,
    "syncer.to.host": carried("sink.mysql.url"),
    "syncer.to.port": carried("sink.mysql.url"),
    "syncer.to.user": carried("sink.mysql.user"),
    "syncer.to.password": carried("sink.mysql.password_file"),
    "syncer.to.encrypted_password": missing("write the password into the file of sink.mysql.password_file"),
    "syncer.to.security.ssl-ca": carried("sink.mysql.url"),
    "syncer.to.security.*": missing("set ssl_cert and ssl_key in sink.mysql.url"),
    "syncer.to.sync-mode": missing("drop the columns that the target does not have with a `map` step", "1"),
    "syncer.to.merge": needless("a batch writes the last image of each key"),
    "syncer.to.params.*": missing("sessions have the server's own settings"),
    "syncer.to.read-timeout": needless("a silent connection is always detected"),
    "syncer.to.checkpoint.*": _CHECKPOINT,
    "syncer.to.dir": carried("sink.drainer.path"),
    "syncer.to.retention-time": missing("files are not deleted by age", "0"),
    "syncer.to.kafka-addrs": carried("sink.kafka.servers"),
    "syncer.to.topic-name": carried("sink.kafka.topic"),
    "syncer.to.kafka-client-id": carried("sink.kafka.options: client.id"),
    "syncer.to.kafka-max-message-size": carried("sink.kafka.options: message.max.bytes"),
    "syncer.to.kafka-max-messages": _KAFKA_CLIENT,
    "syncer.to.kafka-version": needless("librdkafka speaks with every broker since 0.8"),
    "syncer.to.zookeeper-addrs": missing("name the brokers in sink.kafka.servers"),
    "syncer.to.oracle-service-name": _ORACLE,
    "syncer.to.oracle-connect-string": _ORACLE,
}

CHECKPOINT_REFERENCE: dict[str, Rule] = {
    "commitTS": carried("start"),
    "consistent": needless("a transaction that is written again changes nothing in a mirror"),
    "schema-version": needless("definitions come from the DDL jobs"),
    "ts-map.*": missing("`penstock verify` compares without pairs of timestamps"),
}
