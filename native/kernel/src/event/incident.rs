//! Incidents: the server reports that changes may be missing from its log.

use crate::cursor::Cursor;
use crate::error::Result;

/// Reads the message of an incident: number u16, then length u8 and text.
pub fn message(body: &[u8]) -> Result<String> {
    let mut cursor = Cursor::new(body);
    let number = cursor.u16()?;
    let text = cursor.prefixed(1)?;
    Ok(format!("incident {number}: {}", String::from_utf8_lossy(text)))
}
