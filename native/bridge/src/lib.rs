//! `penstock._native`: the Python interface of the kernel. It converts data between Python and the kernel, and reads the
//! socket of a capture.

mod array;
mod batch;
mod blocks;
mod bson;
mod convert;
mod decoder;
mod envelope;
mod framer;
mod grpc;
mod gtid_set;
mod moved;
mod objects;
mod raise;
mod resultset;
mod row_events;
mod row_hash;
mod row_search;
mod schema;
mod slots;
mod socket;
mod sql;
mod statement;
mod tidb;

use pyo3::prelude::*;

/// The kernel's Python module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<decoder::Decoder>()?;
    module.add_class::<decoder::TableRequest>()?;
    module.add_class::<statement::Statement>()?;
    module.add_class::<array::ArrowArray>()?;
    module.add_class::<batch::Batch>()?;
    module.add_class::<framer::Framer>()?;
    module.add_function(wrap_pyfunction!(framer::follow_events, module)?)?;
    module.add_class::<grpc::GrpcConnection>()?;
    module.add_class::<gtid_set::GtidSet>()?;
    module.add_class::<moved::EventMover>()?;
    module.add_class::<blocks::BlockCutter>()?;
    module.add_class::<blocks::CutCounts>()?;
    module.add_class::<blocks::Chunk>()?;
    module.add_class::<resultset::ResultSet>()?;
    module.add_class::<schema::Schema>()?;
    module.add_function(wrap_pyfunction!(schema::arrow_schema, module)?)?;
    module.add_function(wrap_pyfunction!(schema::envelope_schema, module)?)?;
    module.add_function(wrap_pyfunction!(schema::events_schema, module)?)?;
    module.add_function(wrap_pyfunction!(schema::transactions_schema, module)?)?;
    module.add_function(wrap_pyfunction!(schema::messages_schema, module)?)?;
    module.add_function(wrap_pyfunction!(envelope::decode_envelope, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::segment_head, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::read_segment_head, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::encode_gtid_set, module)?)?;
    module.add_function(wrap_pyfunction!(bson::bson_documents, module)?)?;
    module.add_function(wrap_pyfunction!(slots::shard_slots, module)?)?;
    module.add_function(wrap_pyfunction!(row_hash::row_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(sql::sql_values, module)?)?;
    module.add_function(wrap_pyfunction!(sql::copy_text, module)?)?;
    module.add_function(wrap_pyfunction!(sql::key_groups, module)?)?;
    module.add_function(wrap_pyfunction!(objects::json_objects, module)?)?;
    module.add_function(wrap_pyfunction!(objects::column_texts, module)?)?;
    module.add_function(wrap_pyfunction!(objects::crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(objects::encode_changes, module)?)?;
    module.add_function(wrap_pyfunction!(objects::encode_drainer, module)?)?;
    module.add_function(wrap_pyfunction!(objects::debezium_schemas, module)?)?;
    module.add_function(wrap_pyfunction!(objects::partitions, module)?)?;
    module.add_function(wrap_pyfunction!(objects::cluster_slots, module)?)?;
    module.add_class::<row_events::RowEventWriter>()?;
    module.add_class::<row_search::RowSearch>()?;
    module.add_class::<tidb::TidbTranscoder>()?;
    module.add_class::<tidb::TidbPieces>()?;
    module.add_function(wrap_pyfunction!(tidb::tidb_heads, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_prewrite_key, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_ddl, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_matched, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_payload_events, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_payloads, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_file_head, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_rotation, module)?)?;
    module.add_function(wrap_pyfunction!(tidb::tidb_write_request, module)?)?;
    module.add_function(wrap_pyfunction!(convert::decode_text, module)?)?;
    module.add_function(wrap_pyfunction!(convert::error_kinds, module)?)?;
    module.add_function(wrap_pyfunction!(convert::event_kinds, module)?)?;
    module.add_function(wrap_pyfunction!(convert::charsets, module)?)?;
    Ok(())
}
