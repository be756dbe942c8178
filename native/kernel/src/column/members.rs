//! Writes the members of ENUM and SET as declared in SQL.

use std::sync::Arc;

/// Returns the declaration of an ENUM or SET with these members.
pub(super) fn type_text(name: &str, values: &[Arc<str>]) -> String {
    let mut text = name.to_owned();
    write_members(values, &mut text);
    text
}

/// Writes members in parentheses, quoted like the server does.
fn write_members(values: &[Arc<str>], out: &mut String) {
    for (slot, member) in values.iter().enumerate() {
        out.push_str(if slot == 0 { "('" } else { ",'" });
        for letter in member.chars() {
            match letter {
                '\'' => out.push_str("''"),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\0' => out.push_str("\\0"),
                letter => out.push(letter),
            }
        }
        out.push('\'');
    }
    out.push(')');
}
