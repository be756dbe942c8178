//! Applies partial JSON updates, which PARTIAL_UPDATE_ROWS events log instead of the whole document.
//!
//! Source: `Json_diff_vector::read_binary` and `apply_json_diffs` of the server. Only the containers on the path to a
//! change are unpacked; the rest stays a view of the previous document.

use std::borrow::Cow;

use crate::cursor::Cursor;
use crate::error::{value_malformed, Error, Result};

use super::binary::{utf8, Node};
use super::style::JsonStyle;
use super::text::{deeper, Writer};

const REPLACE: u8 = 0;
const INSERT: u8 = 1;
const REMOVE: u8 = 2;

/// A value of the document, possibly changed.
enum Tree<'a> {
    View(Node<'a>),
    Array(Vec<Tree<'a>>),
    /// Members in the server's order: by the length of the key, then by its bytes.
    Object(Vec<(Cow<'a, str>, Tree<'a>)>),
}

/// A step of a path.
enum Leg {
    Member(String),
    Cell(usize),
}

/// Applies the changes in `diffs` to `before`; returns the document as the server's text.
///
/// `diffs` is the column's value in the after image, without its length prefix. Raises `ValueMalformed` if a path does
/// not exist or either input is malformed, `LimitExceeded` if the result is nested too deeply.
pub fn apply_partial(before: &[u8], diffs: &[u8]) -> Result<String> {
    apply_partial_in(before, diffs, JsonStyle::Server)
}

/// Applies the changes like `apply`, and returns the text in the given style.
pub fn apply_partial_in(before: &[u8], diffs: &[u8], style: JsonStyle) -> Result<String> {
    let mut tree = Tree::View(Node::document(before)?);
    let mut cursor = Cursor::new(diffs);
    while !cursor.is_empty() {
        let operation = cursor.u8()?;
        let path = parse_path(cursor.length_encoded_bytes()?)?;
        match operation {
            REPLACE => *seek(&mut tree, &path)? = Tree::View(Node::document(cursor.length_encoded_bytes()?)?),
            INSERT => insert(&mut tree, &path, Node::document(cursor.length_encoded_bytes()?)?)?,
            REMOVE => remove(&mut tree, &path)?,
            _ => return Err(value_malformed(format!("the unknown JSON change {operation}"))),
        }
    }
    let mut out = Vec::new();
    write(&tree, 0, &mut Writer::new(before.len() + diffs.len(), style, &mut out))?;
    String::from_utf8(out).map_err(|_| value_malformed("a JSON document that is not UTF-8"))
}

fn write(tree: &Tree<'_>, depth: usize, writer: &mut Writer<'_>) -> Result<()> {
    match tree {
        Tree::View(node) => return writer.node(*node, depth),
        Tree::Array(cells) => {
            let depth = deeper(depth)?;
            writer.put(b"[");
            for (slot, cell) in cells.iter().enumerate() {
                if slot > 0 {
                    writer.put(b", ");
                }
                write(cell, depth, writer)?;
            }
            writer.put(b"]");
        }
        Tree::Object(members) => {
            let depth = deeper(depth)?;
            writer.put(b"{");
            for (slot, (key, value)) in members.iter().enumerate() {
                if slot > 0 {
                    writer.put(b", ");
                }
                writer.string(key.as_bytes())?;
                writer.put(b": ");
                write(value, depth, writer)?;
            }
            writer.put(b"}");
        }
    }
    Ok(())
}

#[cold]
fn path_not_found() -> Error {
    value_malformed("a JSON change whose path leads nowhere in the document before")
}

impl<'a> Tree<'a> {
    /// Unpacks a viewed container by one level.
    fn open(&mut self) -> Result<()> {
        match self {
            Tree::View(Node::Array(array)) => {
                let cells = (0..array.len()).map(|slot| Ok(Tree::View(array.value(slot)?)));
                *self = Tree::Array(cells.collect::<Result<_>>()?);
            }
            Tree::View(Node::Object(object)) => {
                let members = (0..object.len()).map(|slot| {
                    let value = Tree::View(object.value(slot)?);
                    Ok((utf8(object.key(slot)?)?.into(), value))
                });
                *self = Tree::Object(members.collect::<Result<_>>()?);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Finds the index of a member, or the index at which to insert it.
fn find_member(members: &[(Cow<'_, str>, Tree<'_>)], key: &str) -> std::result::Result<usize, usize> {
    members.binary_search_by(|(member, _)| (member.len(), member.as_ref()).cmp(&(key.len(), key)))
}

/// Returns the value at the end of a path.
fn seek<'t, 'a>(tree: &'t mut Tree<'a>, path: &[Leg]) -> Result<&'t mut Tree<'a>> {
    let mut tree = tree;
    for leg in path {
        tree.open()?;
        tree = match (leg, tree) {
            (Leg::Cell(slot), Tree::Array(cells)) => cells.get_mut(*slot).ok_or_else(path_not_found)?,
            (Leg::Member(key), Tree::Object(members)) => {
                let slot = find_member(members, key).map_err(|_| path_not_found())?;
                members.get_mut(slot).map(|(_, value)| value).ok_or_else(path_not_found)?
            }
            _ => return Err(path_not_found()),
        };
    }
    Ok(tree)
}

fn insert<'a>(tree: &mut Tree<'a>, path: &[Leg], value: Node<'a>) -> Result<()> {
    let (last, way) = path.split_last().ok_or_else(path_not_found)?;
    let parent = seek(tree, way)?;
    parent.open()?;
    match (last, parent) {
        (Leg::Cell(slot), Tree::Array(cells)) => cells.insert((*slot).min(cells.len()), Tree::View(value)),
        (Leg::Member(key), Tree::Object(members)) => match find_member(members, key) {
            Err(slot) => members.insert(slot, (key.clone().into(), Tree::View(value))),
            Ok(_) => return Err(value_malformed("a JSON change that inserts a member that is there")),
        },
        _ => return Err(path_not_found()),
    }
    Ok(())
}

fn remove(tree: &mut Tree<'_>, path: &[Leg]) -> Result<()> {
    let (last, way) = path.split_last().ok_or_else(path_not_found)?;
    let parent = seek(tree, way)?;
    parent.open()?;
    match (last, parent) {
        (Leg::Cell(slot), Tree::Array(cells)) if *slot < cells.len() => {
            cells.remove(*slot);
        }
        (Leg::Member(key), Tree::Object(members)) => {
            let slot = find_member(members, key).map_err(|_| path_not_found())?;
            members.remove(slot);
        }
        _ => return Err(path_not_found()),
    }
    Ok(())
}

#[cold]
fn bad_path() -> Error {
    value_malformed("a JSON change with a path that cannot be read")
}

/// Parses `$.name."any name"[3]`.
fn parse_path(bytes: &[u8]) -> Result<Vec<Leg>> {
    let text = std::str::from_utf8(bytes).map_err(|_| bad_path())?;
    let mut rest = text.strip_prefix('$').ok_or_else(bad_path)?;
    let mut legs = Vec::new();
    while !rest.is_empty() {
        if let Some(cell) = rest.strip_prefix('[') {
            let (slot, after) = cell.split_once(']').ok_or_else(bad_path)?;
            legs.push(Leg::Cell(slot.trim().parse().map_err(|_| bad_path())?));
            rest = after;
            continue;
        }
        let name = rest.strip_prefix('.').ok_or_else(bad_path)?;
        let (key, after) = match name.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = name.find(['.', '[']).unwrap_or(name.len());
                let (key, after) = name.split_at(end);
                (key.to_owned(), after)
            }
        };
        legs.push(Leg::Member(key));
        rest = after;
    }
    Ok(legs)
}

/// Parses a JSON string after its opening quote; returns it and the rest after the closing quote.
fn unquote(text: &str) -> Result<(String, &str)> {
    let mut key = String::new();
    let mut letters = text.chars();
    loop {
        match letters.next().ok_or_else(bad_path)? {
            '"' => return Ok((key, letters.as_str())),
            '\\' => key.push(match letters.next().ok_or_else(bad_path)? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let (digits, after) = letters.as_str().split_at_checked(4).ok_or_else(bad_path)?;
                    letters = after.chars();
                    let code = u32::from_str_radix(digits, 16).map_err(|_| bad_path())?;
                    char::from_u32(code).ok_or_else(bad_path)?
                }
                character => character,
            }),
            letter => key.push(letter),
        }
    }
}
