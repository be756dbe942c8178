//! Framing: packets of the replication protocol, consecutive events, and payloads that contain events.

pub(crate) mod events;
pub mod packet;
pub(crate) mod unpack;
