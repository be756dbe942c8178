//! How events are framed: packets of the replication protocol, events one behind the other, and payloads that hold more.

pub(crate) mod events;
pub mod packet;
pub(crate) mod unpack;
