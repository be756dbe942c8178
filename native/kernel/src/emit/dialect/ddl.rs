//! What a definition defines, by its first words: enough for the marks that messages carry, not a parser.

use std::borrow::Cow;

/// The kinds of definition that Canal tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DefinitionKind {
    Create,
    Alter,
    /// DROP TABLE.
    Erase,
    /// Whatever is none of the others.
    Query,
    Truncate,
    Rename,
    CreateIndex,
    DropIndex,
}

impl DefinitionKind {
    /// The number in Canal's and Ptubes' `EventType`.
    pub fn number(self) -> u64 {
        match self {
            DefinitionKind::Create => 4,
            DefinitionKind::Alter => 5,
            DefinitionKind::Erase => 6,
            DefinitionKind::Query => 7,
            DefinitionKind::Truncate => 8,
            DefinitionKind::Rename => 9,
            DefinitionKind::CreateIndex => 10,
            DefinitionKind::DropIndex => 11,
        }
    }

    /// The name in Canal's `EventType`.
    pub fn name(self) -> &'static str {
        match self {
            DefinitionKind::Create => "CREATE",
            DefinitionKind::Alter => "ALTER",
            DefinitionKind::Erase => "ERASE",
            DefinitionKind::Query => "QUERY",
            DefinitionKind::Truncate => "TRUNCATE",
            DefinitionKind::Rename => "RENAME",
            DefinitionKind::CreateIndex => "CINDEX",
            DefinitionKind::DropIndex => "DINDEX",
        }
    }
}

/// A definition, and the first table that it names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition<'a> {
    /// What it does.
    pub kind: DefinitionKind,
    /// The table's database, or the default one.
    pub database: Cow<'a, str>,
    /// The table; empty where none is named.
    pub table: Cow<'a, str>,
}

/// One piece of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token<'a> {
    /// A bare word: a keyword or a name.
    Word(&'a str),
    /// A name in backticks or double quotes.
    Quoted(Cow<'a, str>),
    /// Any other character, a string as a whole.
    Sign(char),
}

impl Token<'_> {
    fn is(&self, word: &str) -> bool {
        matches!(self, Token::Word(found) if found.eq_ignore_ascii_case(word))
    }
}

struct Tokens<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        self.skip_blanks();
        let first = self.rest.chars().next()?;
        if first == '`' || first == '"' {
            return Some(self.quoted(first));
        }
        let is_word = |character: char| character.is_alphanumeric() || matches!(character, '_' | '$' | '@');
        let length = self.rest.find(|character: char| !is_word(character)).unwrap_or(self.rest.len());
        if length > 0 {
            let (word, rest) = self.rest.split_at(length);
            self.rest = rest;
            return Some(Token::Word(word));
        }
        self.rest = self.rest.get(first.len_utf8()..).unwrap_or_default();
        if first == '\'' {
            self.rest = self.rest.split_once('\'').map_or("", |(_, rest)| rest);
        }
        Some(Token::Sign(first))
    }
}

impl<'a> Tokens<'a> {
    /// Passes over white space and comments, and into those that the server runs (`/*!50100 ... */`).
    fn skip_blanks(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            if let Some(inside) = self.rest.strip_prefix("/*!").or_else(|| self.rest.strip_prefix("/*M!")) {
                self.rest = inside.trim_start_matches(|character: char| character.is_ascii_digit());
            } else if let Some(comment) = self.rest.strip_prefix("/*") {
                self.rest = comment.split_once("*/").map_or("", |(_, rest)| rest);
            } else if let Some(rest) = self.rest.strip_prefix("*/") {
                self.rest = rest;
            } else if self.rest.starts_with("--") || self.rest.starts_with('#') {
                self.rest = self.rest.split_once('\n').map_or("", |(_, rest)| rest);
            } else {
                return;
            }
        }
    }

    fn quoted(&mut self, quote: char) -> Token<'a> {
        let inside = self.rest.get(1..).unwrap_or_default();
        let Some(end) = inside.find(quote) else {
            self.rest = "";
            return Token::Quoted(inside.into());
        };
        let (name, behind) = (inside.get(..end).unwrap_or_default(), inside.get(end + 1..).unwrap_or_default());
        if !behind.starts_with(quote) {
            self.rest = behind;
            return Token::Quoted(name.into());
        }
        // A quote inside a name stands twice.
        let mut whole = name.to_owned();
        let mut rest = behind;
        while let Some(more) = rest.strip_prefix(quote) {
            whole.push(quote);
            let end = more.find(quote).unwrap_or(more.len());
            whole.push_str(more.get(..end).unwrap_or_default());
            rest = more.get(end + 1..).unwrap_or_default();
        }
        self.rest = rest;
        Token::Quoted(whole.into())
    }
}

/// Words that may stand between the verb, what it is done to, and its name.
const FILLERS: [&str; 15] = [
    "OR",
    "REPLACE",
    "TEMPORARY",
    "IF",
    "NOT",
    "EXISTS",
    "ONLINE",
    "OFFLINE",
    "IGNORE",
    "UNIQUE",
    "FULLTEXT",
    "SPATIAL",
    "VECTOR",
    "WAIT",
    "NOWAIT",
];

/// Tells what a definition does, and to which table first.
pub fn classify<'a>(text: &'a str, database: &'a str) -> Definition<'a> {
    let mut tokens = Tokens { rest: text };
    let none = Definition { kind: DefinitionKind::Query, database: database.into(), table: "".into() };
    let Some(verb) = tokens.next() else { return none };
    let mut next = || tokens.find(|token| !FILLERS.iter().any(|filler| token.is(filler)));
    let Some(second) = next() else { return none };
    let is_table = second.is("TABLE") || second.is("TABLES");
    let kind = if verb.is("TRUNCATE") {
        let first = if is_table { next() } else { Some(second) };
        return named(DefinitionKind::Truncate, first, &mut tokens, none);
    } else if verb.is("CREATE") && is_table {
        DefinitionKind::Create
    } else if verb.is("ALTER") && is_table {
        DefinitionKind::Alter
    } else if verb.is("DROP") && is_table {
        DefinitionKind::Erase
    } else if verb.is("RENAME") && is_table {
        DefinitionKind::Rename
    } else if (verb.is("CREATE") || verb.is("DROP")) && second.is("INDEX") {
        let kind = if verb.is("CREATE") { DefinitionKind::CreateIndex } else { DefinitionKind::DropIndex };
        // The index's own name may be the word ON in quotes, which is no word.
        if tokens.find(|token| token.is("ON")).is_none() {
            return none;
        }
        kind
    } else {
        return none;
    };
    let first = tokens.find(|token| !FILLERS.iter().any(|filler| token.is(filler)));
    named(kind, first, &mut tokens, none)
}

/// Reads a name of one part or two.
fn named<'a>(
    kind: DefinitionKind,
    first: Option<Token<'a>>,
    tokens: &mut Tokens<'a>,
    none: Definition<'a>,
) -> Definition<'a> {
    let name = |token: Option<Token<'a>>| match token {
        Some(Token::Word(word)) => Some(Cow::Borrowed(word)),
        Some(Token::Quoted(name)) => Some(name),
        _ => None,
    };
    let Some(first) = name(first) else { return none };
    if tokens.next() == Some(Token::Sign('.')) {
        if let Some(second) = name(tokens.next()) {
            return Definition { kind, database: first, table: second };
        }
    }
    Definition { kind, table: first, ..none }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_known_by_their_first_words() {
        use DefinitionKind::*;
        for (text, kind, database, table) in [
            ("CREATE TABLE t (a int)", Create, "shop", "t"),
            ("/* by us */ create temporary table if not exists `x y`.`a``b` (a int)", Create, "x y", "a`b"),
            ("CREATE OR REPLACE TABLE \"t\" (a int)", Create, "shop", "t"),
            ("ALTER TABLE other . t ADD COLUMN b int", Alter, "other", "t"),
            ("ALTER ONLINE IGNORE TABLE t FORCE", Alter, "shop", "t"),
            ("/*!40000 ALTER TABLE `t` DISABLE KEYS */", Alter, "shop", "t"),
            ("DROP TABLE IF EXISTS `t`,`u` /* generated by server */", Erase, "shop", "t"),
            ("TRUNCATE t", Truncate, "shop", "t"),
            ("TRUNCATE TABLE `s`.`t`", Truncate, "s", "t"),
            ("RENAME TABLE a TO b", Rename, "shop", "a"),
            ("CREATE UNIQUE INDEX i ON s.t (a)", CreateIndex, "s", "t"),
            ("CREATE INDEX `ON` USING BTREE ON t (a)", CreateIndex, "shop", "t"),
            ("-- why\nDROP INDEX i ON t", DropIndex, "shop", "t"),
            ("CREATE DATABASE x", Query, "shop", ""),
            ("CREATE VIEW v AS SELECT 1", Query, "shop", ""),
            ("GRANT ALL ON *.* TO 'a'@'%'", Query, "shop", ""),
            ("DROP TABLE", Query, "shop", ""),
            ("ALTER TABLE `open", Alter, "shop", "open"),
            ("", Query, "shop", ""),
        ] {
            let found = classify(text, "shop");
            assert_eq!((found.kind, &*found.database, &*found.table), (kind, database, table), "{text}");
        }
    }
}
