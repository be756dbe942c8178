# SPDX-License-Identifier: Apache-2.0
"""The properties of Bifrost's export, and the parameters of its plugins (wiki.xbifrost.com)."""

from penstock.migrate.report import Rule, carried, changed, missing, needless

_STATE = needless("a state of the running process")
_CHANNEL = needless("see batch.parts: the order of each key is always kept")

EXPORT: dict[str, Rule] = {
    "Version": needless("the version of Bifrost"),
    "StartTime": _STATE,
    "ToServer": carried("sink"),
    "DbInfo": carried("source"),
    "User": needless("accounts of the administration pages: see access of penstock.yaml"),
    "Warning": missing("see alerts of penstock.yaml", "{}", "[]", "null"),
}
DATA_SOURCE: dict[str, Rule] = {
    "Name": carried("source.name"),
    "InputType": carried("source.url"),
    "ConnectUri": carried("source.url"),
    "ConnStatus": _STATE,
    "ConnErr": _STATE,
    "ChannelMap": _CHANNEL,
    "LastChannelID": _CHANNEL,
    "TableMap": carried("source.tables"),
    "IsGtid": carried("source.start"),
    "LastEventID": _STATE,
    "Gtid": carried("source.start"),
    "BinlogDumpFileName": carried("source.start"),
    "BinlogDumpPosition": carried("source.start"),
    "BinlogDumpTimestamp": needless("the position comes first"),
    "MaxBinlogDumpFileName": missing("a pipeline has no end: run it with --until caught-up"),
    "MaxinlogDumpPosition": missing("a pipeline has no end: run it with --until caught-up", "0"),
    "ReplicateDoDb": needless("the tables select the databases"),
    "ServerId": carried("source.server_id"),
    "AddTime": _STATE,
}
TABLE: dict[str, Rule] = {
    "Name": carried("source.tables"),
    "ChannelKey": _CHANNEL,
    "LastToServerID": _STATE,
    "ToServerList": carried("a pipeline for each target"),
    "IgnoreTable": carried("source.exclude"),
    "DoTable": carried("source.tables"),
}
SYNCHRONISATION: dict[str, Rule] = {
    "ToServerID": _STATE,
    "PluginName": carried("sink"),
    "MustBeSuccess": missing("an error is retried, then the pipeline stops: see errors", "true"),
    "FilterQuery": needless("definitions reach the targets that have columns, see schema_changes"),
    "FilterUpdate": missing("updates that change none of the columns are written too", "false"),
    "FieldList": carried("step `map`"),
    "ToServerKey": carried("sink"),
    "LastSuccessBinlog": carried("source.start"),
    "LastQueueBinlog": carried("source.start"),
    "BinlogFileNum": needless("LastSuccessBinlog comes first"),
    "BinlogPosition": needless("LastSuccessBinlog comes first"),
    "LastBinlogFileNum": needless("LastQueueBinlog comes first"),
    "LastBinlogPosition": needless("LastQueueBinlog comes first"),
    "Status": _STATE,
    "Error": _STATE,
    "ErrorWaitDeal": _STATE,
    "ErrorWaitData": _STATE,
    "QueueMsgCount": _STATE,
    "FileQueueStatus": needless("a slow target holds its own pipeline back, and no other"),
    "FileQueueUsableCount": _STATE,
    "FileQueueUsableCountStartTime": _STATE,
    "Notes": needless("a comment"),
    "ThreadCount": needless("see batch.parts"),
}
TARGET: dict[str, Rule] = {
    "PluginName": carried("sink"),
    "PluginVersion": needless("the version of the plugin"),
    "ConnUri": carried("sink, its address and account"),
    "Notes": needless("a comment"),
    "LastID": _STATE,
    "CurrentConn": _STATE,
    "MaxConn": needless("see batch.parts, and connections of the mysql sink"),
    "MinConn": needless("connections are opened when they are needed"),
    "AvailableConn": _STATE,
    "UpdateTime": _STATE,
}

_BATCH = needless("see batch")
_KEY = needless("rows are written by the source's primary key; a `map` step can set another key")
_SAME_IN_SYNCHRONISATION = {
    "PluginParam.BifrostMustBeSuccess": missing("see MustBeSuccess", "true", "false"),
    "PluginParam.BifrostFilterQuery": needless("see FilterQuery"),
    "PluginParam.BatchSize": _BATCH,
    "PluginParam.Field": carried("step `map`"),
    "PluginParam.PriKey": _KEY,
}
PLUGIN_PARAMETERS: dict[str, dict[str, Rule]] = {
    "mysql": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.Schema": carried("step `route`"),
        "PluginParam.Table": carried("step `route`"),
        "PluginParam.SyncMode": carried("sink.mysql.mode"),
        "PluginParam.NullTransferDefault": missing("null stays null", "false"),
        "PluginParam.AutoTable": needless("missing tables are created"),
    },
    "clickhouse": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.CkSchema": carried("step `route`"),
        "PluginParam.CkTable": carried("step `route`"),
        "PluginParam.SyncType": carried("sink.clickhouse.write"),
        "PluginParam.AutoCreateTable": needless("missing tables are created"),
        "PluginParam.AutoSchemaPrefix": missing("write a `route` step"),
        "PluginParam.AutoTablePrefix": missing("write a `route` step"),
        "PluginParam.NullNotTransferDefault": missing("null stays null", "true"),
        "PluginParam.LowerCaseTableNames": missing("write a `route` step with lower(table)", "0"),
        "PluginParam.ModifDDLType": changed("schema_changes"),
        "PluginParam.CkEngine": missing("tables are made on one server", "0", "1"),
        "PluginParam.CkTableEngine": needless("a mirror is a ReplacingMergeTree, a feed a MergeTree"),
        "PluginParam.CkClusterName": missing("tables are made on one server"),
    },
    "kafka": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.OtherObjectType": carried("sink.kafka.format"),
        "PluginParam.Topic": carried("sink.kafka.topic"),
        "PluginParam.Key": carried("sink.kafka.key"),
        "PluginParam.Timeout": needless("see errors.retry_for"),
        "PluginParam.RequiredAcks": needless("every batch is written with acks=all"),
    },
    "redis": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.KeyConfig": carried("sink.redis.key"),
        "PluginParam.Expir": carried("sink.redis.expire"),
        "PluginParam.DataType": carried("sink.redis.value"),
        "PluginParam.ValConfig": carried("sink.redis.value"),
        "PluginParam.Type": carried("sink.redis.write"),
    },
    "elasticsearch": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.EsIndexName": carried("sink.elasticsearch.index"),
        "PluginParam.PrimaryKey": _KEY,
        "PluginParam.Mapping": missing("an index is made with the columns' types"),
    },
    "http": _SAME_IN_SYNCHRONISATION
    | {
        "PluginParam.Timeout": carried("sink.http.timeout"),
        "PluginParam.ContentType": missing("requests are JSON", "application/json", "application/json-raw"),
    },
}
