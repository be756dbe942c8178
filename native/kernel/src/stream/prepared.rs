//! XA transactions that were prepared and of which the outcome has not come.
//!
//! Rows are logged when a transaction is prepared and handed out then. Where it is rolled back later, the reader must
//! stop if any of those rows were handed out, and only then: other people's roll-backs are no concern of a reader.

use std::collections::HashMap;

/// Prepared transactions that are remembered at once. A server holds a few; one that is not remembered counts as unknown.
const REMEMBERED_MAX: usize = 65_536;

/// What is known of a prepared transaction when its roll-back comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// This range saw it prepared and handed out none of its rows.
    Untouched,
    /// This range handed out this many of its changes.
    HandedOut(u32),
    /// It was prepared before this range.
    Elsewhere,
}

/// Transactions by their id as the server writes it in statements: `X'67747269',X'62',1`.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    changes: HashMap<Box<[u8]>, u32>,
}

impl Prepared {
    /// Remembers one whose rows were passed on; `changes` counts those of tables that are read.
    pub(super) fn add(&mut self, id: Box<[u8]>, changes: u32) {
        if self.changes.len() >= REMEMBERED_MAX {
            self.changes.clear();
        }
        self.changes.insert(id, changes);
    }

    /// Takes out the one that a statement ends: `XA COMMIT id` or `XA ROLLBACK id`.
    pub(super) fn take(&mut self, statement: &[u8]) -> Known {
        match id_of(statement).and_then(|id| self.changes.remove(id)) {
            Some(0) => Known::Untouched,
            Some(changes) => Known::HandedOut(changes),
            None => Known::Elsewhere,
        }
    }
}

/// The id in `XA END id`, `XA COMMIT id` or `XA ROLLBACK id`.
pub(super) fn id_of(statement: &[u8]) -> Option<&[u8]> {
    let mut words = statement.splitn(3, |byte| byte.is_ascii_whitespace());
    let (first, _, id) = (words.next()?, words.next()?, words.next()?);
    (first.eq_ignore_ascii_case(b"XA") && !id.is_empty()).then_some(id.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_roll_back_is_judged_by_what_was_handed_out() {
        let mut prepared = Prepared::default();
        for (statement, changes) in [(&b"XA END X'61',X'',1"[..], 0), (b"XA END X'62',X'',1", 3)] {
            prepared.add(id_of(statement).unwrap().into(), changes);
        }
        assert_eq!(prepared.take(b"XA ROLLBACK X'61',X'',1"), Known::Untouched);
        assert_eq!(prepared.take(b"XA ROLLBACK X'62',X'',1"), Known::HandedOut(3));
        assert_eq!(prepared.take(b"XA ROLLBACK X'62',X'',1"), Known::Elsewhere);
        assert_eq!(id_of(b"XA END"), None);
    }
}
