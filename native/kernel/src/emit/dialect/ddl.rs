//! Classifies DDL by its first words. This is not a parser, but suffices to label statements in messages.

use std::borrow::Cow;
use std::iter::Peekable;

use crate::event::query::after_prefix;
use crate::event::session::Backslash;

/// The kinds of DDL that Canal distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DefinitionKind {
    Create,
    Alter,
    /// DROP TABLE.
    Erase,
    /// Any other statement.
    Query,
    Truncate,
    Rename,
    CreateIndex,
    DropIndex,
}

impl DefinitionKind {
    /// Returns the number in Canal's and Ptubes' `EventType`.
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

    /// Returns the name in Canal's `EventType`.
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

/// The effect of a DDL statement on one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition<'a> {
    /// The kind of statement. The kind of an ALTER TABLE is that of its first clause.
    pub kind: DefinitionKind,
    /// Whether the statement is an ALTER TABLE.
    pub alters: bool,
    /// The table's database, or the session's default database.
    pub database: Cow<'a, str>,
    /// The table, or its new name if it is renamed; empty if the statement names no table.
    pub table: Cow<'a, str>,
    /// The database and table before a rename.
    pub renamed_from: Option<(Cow<'a, str>, Cow<'a, str>)>,
    /// Whether the statement is a DROP TABLE IF EXISTS.
    pub if_exists: bool,
}

impl<'a> Definition<'a> {
    fn of(kind: DefinitionKind, (database, table): (Cow<'a, str>, Cow<'a, str>)) -> Definition<'a> {
        Definition { kind, alters: false, database, table, renamed_from: None, if_exists: false }
    }

    /// Returns the part of a DROP TABLE or RENAME TABLE that concerns this table, as a separate statement.
    pub fn own_text(&self) -> String {
        let name = |(database, table): (&str, &str)| format!("{}.{}", quoted_name(database), quoted_name(table));
        match self.kind {
            DefinitionKind::Rename => {
                format!("RENAME TABLE {} TO {}", name(self.name_before()), name((&self.database, &self.table)))
            }
            _ => format!("DROP TABLE {}{}", if self.if_exists { "IF EXISTS " } else { "" }, name(self.name_before())),
        }
    }

    /// Returns the database and table before the statement.
    pub fn name_before(&self) -> (&str, &str) {
        match &self.renamed_from {
            Some((database, table)) => (database, table),
            None => (&self.database, &self.table),
        }
    }
}

fn quoted_name(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

/// A token of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token<'a> {
    /// An unquoted word: a keyword or a name.
    Word(&'a str),
    /// A name in backticks or double quotes.
    Quoted(Cow<'a, str>),
    /// Any other character. A string literal in single quotes is one `Sign('\'')`.
    Sign(char),
}

impl Token<'_> {
    fn is(&self, word: &str) -> bool {
        matches!(self, Token::Word(token) if token.eq_ignore_ascii_case(word))
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
    /// Skips white space and comments, but not the contents of comments that the server runs (`/*!50100 ... */`).
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
        let (name, after) = (inside.get(..end).unwrap_or_default(), inside.get(end + 1..).unwrap_or_default());
        if !after.starts_with(quote) {
            self.rest = after;
            return Token::Quoted(name.into());
        }
        // A quote inside a name is doubled.
        let mut whole = name.to_owned();
        let mut rest = after;
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

/// Words that may occur between the verb, the kind of object, and its name.
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

/// Returns the effect of a DDL statement on the first table that it names.
pub fn classify<'a>(text: &'a str, database: &'a str, backslash: Backslash) -> Definition<'a> {
    Reader::new(text, database, backslash).next_or_query()
}

/// Returns the effect of a DDL statement on each of its tables, in order; a single `Query` if it names no table.
pub fn definitions<'a>(text: &'a str, database: &'a str, backslash: Backslash) -> impl Iterator<Item = Definition<'a>> {
    let mut reader = Reader::new(text, database, backslash);
    let first = reader.next_or_query();
    std::iter::once(first).chain(std::iter::from_fn(move || reader.next_listed()))
}

/// Returns the effect of a DDL statement on each of its tables, each with a statement that names only this table.
///
/// A DROP TABLE always has the same spelling, whatever the client wrote. All other statements that name a single table
/// are returned as logged.
pub fn table_statements<'a>(
    text: &'a str,
    database: &'a str,
    backslash: Backslash,
) -> impl Iterator<Item = (Definition<'a>, Cow<'a, str>)> {
    let mut tables = definitions(text, database, backslash).peekable();
    let first = tables.next();
    let is_whole = tables.peek().is_none() && first.as_ref().is_some_and(|first| first.kind != DefinitionKind::Erase);
    first.into_iter().chain(tables).map(move |definition| {
        let own_text: Cow<'a, str> = if is_whole { text.into() } else { definition.own_text().into() };
        (definition, own_text)
    })
}

/// Returns a statement with the effect that a failed statement in the log still had, or `None` if it had no effect.
///
/// MariaDB's CREATE OR REPLACE TABLE drops the table first. If it fails after that, it is logged unchanged
/// (`mysql_create_table`). A DROP TABLE that failed has still dropped those listed tables that existed.
pub fn outcome_of_failed<'a>(text: &'a str, database: &str, backslash: Backslash) -> Option<Cow<'a, str>> {
    let mut tokens = Tokens { rest: after_prefix(text, backslash)? };
    let verb = tokens.next()?;
    if verb.is("DROP") {
        return Some(text.into());
    }
    let replaces = ["OR", "REPLACE", "TABLE"].iter().all(|word| tokens.next().is_some_and(|token| token.is(word)));
    if !verb.is("CREATE") || !replaces {
        return None;
    }
    let definition = classify(text, database, backslash);
    let (database, table) = definition.name_before();
    Some(format!("DROP TABLE IF EXISTS {}.{}", quoted_name(database), quoted_name(table)).into())
}

/// Parses a DDL statement from its start, then each further table of its list.
struct Reader<'a> {
    tokens: Peekable<Tokens<'a>>,
    database: &'a str,
    /// The statement's effect on each table of its list, after the first table was parsed.
    listed: Option<DefinitionKind>,
    /// Whether EXISTS occurred before the first name.
    says_exists: bool,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, database: &'a str, backslash: Backslash) -> Reader<'a> {
        let statement = after_prefix(text, backslash).unwrap_or_default();
        Reader { tokens: Tokens { rest: statement }.peekable(), database, listed: None, says_exists: false }
    }

    fn next_or_query(&mut self) -> Definition<'a> {
        self.first().unwrap_or_else(|| Definition::of(DefinitionKind::Query, (self.database.into(), "".into())))
    }

    fn first(&mut self) -> Option<Definition<'a>> {
        let verb = self.tokens.next()?;
        self.skip_fillers();
        if verb.is("TRUNCATE") {
            self.tokens.next_if(|token| token.is("TABLE"));
            return Some(Definition::of(DefinitionKind::Truncate, self.name()?));
        }
        let object = self.tokens.next()?;
        if object.is("INDEX") && (verb.is("CREATE") || verb.is("DROP")) {
            // A quoted index name may be `ON`, which is not the keyword.
            self.tokens.find(|token| token.is("ON"))?;
            let kind = if verb.is("CREATE") { DefinitionKind::CreateIndex } else { DefinitionKind::DropIndex };
            return Some(Definition::of(kind, self.name()?));
        }
        if !object.is("TABLE") && !object.is("TABLES") {
            return None;
        }
        self.skip_fillers();
        if verb.is("CREATE") {
            Some(Definition::of(DefinitionKind::Create, self.name()?))
        } else if verb.is("ALTER") {
            let name = self.name()?;
            Some(Definition { alters: true, ..self.altered(name) })
        } else if verb.is("DROP") {
            self.listed = Some(DefinitionKind::Erase);
            self.dropped()
        } else if verb.is("RENAME") {
            self.listed = Some(DefinitionKind::Rename);
            self.renamed()
        } else {
            None
        }
    }

    /// Parses the next table of a DROP TABLE or RENAME TABLE, after its comma.
    fn next_listed(&mut self) -> Option<Definition<'a>> {
        let kind = self.listed?;
        self.tokens.next_if(|token| *token == Token::Sign(','))?;
        match kind {
            DefinitionKind::Rename => self.renamed(),
            _ => self.dropped(),
        }
    }

    fn dropped(&mut self) -> Option<Definition<'a>> {
        let if_exists = self.says_exists;
        Some(Definition { if_exists, ..Definition::of(DefinitionKind::Erase, self.name()?) })
    }

    fn renamed(&mut self) -> Option<Definition<'a>> {
        let before = self.name()?;
        self.skip_wait();
        self.tokens.next_if(|token| token.is("TO"))?;
        let after = self.name()?;
        Some(Definition { renamed_from: Some(before), ..Definition::of(DefinitionKind::Rename, after) })
    }

    /// Returns the kind that Canal assigns to an ALTER TABLE, which depends on the first clause alone.
    fn altered(&mut self, name: (Cow<'a, str>, Cow<'a, str>)) -> Definition<'a> {
        let alter = |name| Definition::of(DefinitionKind::Alter, name);
        self.skip_wait();
        match self.tokens.next() {
            Some(token) if token.is("ADD") => match self.adds_index() {
                true => Definition::of(DefinitionKind::CreateIndex, name),
                false => alter(name),
            },
            Some(token) if token.is("DROP") => {
                let drops = ["INDEX", "KEY", "CONSTRAINT"];
                match self.tokens.next() {
                    Some(token) if drops.iter().any(|word| token.is(word)) => {
                        Definition::of(DefinitionKind::DropIndex, name)
                    }
                    _ => alter(name),
                }
            }
            Some(token) if token.is("RENAME") => {
                if self.tokens.peek().is_some_and(|token| ["COLUMN", "INDEX", "KEY"].iter().any(|word| token.is(word)))
                {
                    return alter(name);
                }
                self.tokens.next_if(|token| token.is("TO") || token.is("AS") || *token == Token::Sign('='));
                match self.name() {
                    Some(after) => {
                        Definition { renamed_from: Some(name), ..Definition::of(DefinitionKind::Rename, after) }
                    }
                    None => alter(name),
                }
            }
            _ => alter(name),
        }
    }

    /// Whether ADD is followed by an index, a unique key or a primary key.
    fn adds_index(&mut self) -> bool {
        let indexes = ["INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "VECTOR", "PRIMARY"];
        let is_index = |token: &Token<'_>| indexes.iter().any(|word| token.is(word));
        let Some(token) = self.tokens.next() else { return false };
        if !token.is("CONSTRAINT") {
            return is_index(&token);
        }
        let symbol = self.tokens.next();
        symbol.is_some_and(|token| is_index(&token)) || self.tokens.next().is_some_and(|token| is_index(&token))
    }

    /// Skips MariaDB's NOWAIT, or WAIT and its number.
    fn skip_wait(&mut self) {
        self.skip_fillers();
        let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
        self.tokens.next_if(|token| matches!(token, Token::Word(word) if is_number(word)));
    }

    fn skip_fillers(&mut self) {
        while let Some(token) = self.tokens.next_if(|token| FILLERS.iter().any(|filler| token.is(filler))) {
            self.says_exists |= token.is("EXISTS");
        }
    }

    /// Parses a name with an optional database.
    fn name(&mut self) -> Option<(Cow<'a, str>, Cow<'a, str>)> {
        let first = self.word()?;
        if self.tokens.next_if(|token| *token == Token::Sign('.')).is_none() {
            return Some((self.database.into(), first));
        }
        Some((first, self.word()?))
    }

    fn word(&mut self) -> Option<Cow<'a, str>> {
        match self.tokens.next()? {
            Token::Word(word) => Some(Cow::Borrowed(word)),
            Token::Quoted(name) => Some(name),
            Token::Sign(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Describes each table that the statement changes: the kind, and the table's name before and after the statement.
    fn describe_all(text: &str) -> Vec<String> {
        let describe = |definition: Definition<'_>| {
            let (database, table) = definition.name_before();
            let before = definition.renamed_from.is_some().then(|| format!("{database}.{table} -> "));
            let before = before.unwrap_or_default();
            format!("{} {before}{}.{}", definition.kind.name(), definition.database, definition.table)
        };
        definitions(text, "shop", Backslash::default()).map(describe).collect()
    }

    #[test]
    fn definitions_are_classified_by_their_first_words() {
        for (text, definition) in [
            ("CREATE TABLE t (a int)", "CREATE shop.t"),
            ("/* by us */ create temporary table if not exists `x y`.`a``b` (a int)", "CREATE x y.a`b"),
            ("CREATE OR REPLACE TABLE \"t\" (a int)", "CREATE shop.t"),
            ("DROP TABLE t", "ERASE shop.t"),
            ("TRUNCATE t", "TRUNCATE shop.t"),
            ("TRUNCATE TABLE `s`.`t`", "TRUNCATE s.t"),
            ("-- by us\nTRUNCATE TABLE t WAIT 5", "TRUNCATE shop.t"),
            ("SET STATEMENT a=1, b='x' FOR /* by us */ TRUNCATE t", "TRUNCATE shop.t"),
            ("SET STATEMENT a=1 FOR ALTER TABLE `s`.`é` DROP PARTITION p", "ALTER s.é"),
            ("CREATE UNIQUE INDEX i ON s.t (a)", "CINDEX s.t"),
            ("CREATE INDEX `ON` USING BTREE ON t (a)", "CINDEX shop.t"),
            ("-- why\nDROP INDEX i ON t", "DINDEX shop.t"),
            ("CREATE DATABASE x", "QUERY shop."),
            ("CREATE VIEW v AS SELECT 1", "QUERY shop."),
            ("GRANT ALL ON *.* TO 'a'@'%'", "QUERY shop."),
            ("DROP TABLE", "QUERY shop."),
            ("RENAME TABLE a", "QUERY shop."),
            ("ALTER TABLE `open", "ALTER shop.open"),
            ("", "QUERY shop."),
        ] {
            assert_eq!(describe_all(text), [definition], "{text}");
            let first = classify(text, "shop", Backslash::default());
            assert_eq!(format!("{} {}.{}", first.kind.name(), first.database, first.table), definition, "{text}");
        }
    }

    /// The results of Canal 1.1.7's own parser for the same texts. It considers the first clause only.
    #[test]
    fn alter_table_is_classified_by_its_first_clause() {
        for (text, definition) in [
            ("ALTER TABLE other . t ADD COLUMN b int", "ALTER other.t"),
            ("ALTER ONLINE IGNORE TABLE t FORCE", "ALTER shop.t"),
            ("/*!40000 ALTER TABLE `t` DISABLE KEYS */", "ALTER shop.t"),
            ("ALTER TABLE t ADD b int, ADD INDEX i (b)", "ALTER shop.t"),
            ("ALTER TABLE t ADD INDEX i (b), ADD c int", "CINDEX shop.t"),
            ("ALTER TABLE t ADD KEY i (b)", "CINDEX shop.t"),
            ("ALTER TABLE t WAIT 5 ADD KEY i (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD UNIQUE (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD CONSTRAINT c UNIQUE KEY k (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD CONSTRAINT UNIQUE (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD CONSTRAINT PRIMARY KEY (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD PRIMARY KEY (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD FULLTEXT i (b)", "CINDEX shop.t"),
            ("ALTER TABLE t ADD SPATIAL INDEX i (b)", "CINDEX shop.t"),
            ("ALTER TABLE t DROP INDEX i", "DINDEX shop.t"),
            ("ALTER TABLE t DROP KEY i", "DINDEX shop.t"),
            ("ALTER TABLE t DROP CONSTRAINT c", "DINDEX shop.t"),
            ("ALTER TABLE t DROP PRIMARY KEY", "ALTER shop.t"),
            ("ALTER TABLE t DROP FOREIGN KEY f", "ALTER shop.t"),
            ("ALTER TABLE t DROP c", "ALTER shop.t"),
            ("ALTER TABLE t ADD `index` int", "ALTER shop.t"),
            ("ALTER TABLE t ADD CONSTRAINT c CHECK (a > 1)", "ALTER shop.t"),
            ("ALTER TABLE t RENAME INDEX a TO b", "ALTER shop.t"),
            ("ALTER TABLE t RENAME COLUMN a TO b", "ALTER shop.t"),
            ("ALTER TABLE t COMMENT 'x', ADD INDEX i (a)", "ALTER shop.t"),
            ("ALTER TABLE t RENAME TO u", "RENAME shop.t -> shop.u"),
            ("ALTER TABLE t RENAME AS u", "RENAME shop.t -> shop.u"),
            ("ALTER TABLE t RENAME = u", "RENAME shop.t -> shop.u"),
            ("ALTER TABLE s.t RENAME u, ADD c int", "RENAME s.t -> shop.u"),
            ("ALTER TABLE `a`.`b c` RENAME TO `d`.`e f`", "RENAME a.b c -> d.e f"),
            ("ALTER TABLE t ADD c int, RENAME TO u", "ALTER shop.t"),
        ] {
            assert_eq!(describe_all(text), [definition], "{text}");
        }
    }

    #[test]
    fn each_table_of_a_list_is_returned() {
        let dropped = "DROP TABLE IF EXISTS `t`,s.`u` , v WAIT 5 /* generated by server */";
        assert_eq!(describe_all(dropped), ["ERASE shop.t", "ERASE s.u", "ERASE shop.v"]);
        let renamed = "RENAME TABLE IF EXISTS a WAIT 5 TO b, `s`.`c` NOWAIT TO r.d";
        assert_eq!(describe_all(renamed), ["RENAME shop.a -> shop.b", "RENAME s.c -> r.d"]);
        assert_eq!(describe_all("CREATE TABLE t (a int, b int)"), ["CREATE shop.t"]);
        let own = |text: &str| {
            definitions(text, "shop", Backslash::default()).map(|definition| definition.own_text()).collect::<Vec<_>>()
        };
        assert_eq!(own("drop table `a``b`, t"), ["DROP TABLE `shop`.`a``b`", "DROP TABLE `shop`.`t`"]);
        assert_eq!(
            own("DROP TABLE IF EXISTS t, s.u"),
            ["DROP TABLE IF EXISTS `shop`.`t`", "DROP TABLE IF EXISTS `s`.`u`"]
        );
        assert_eq!(own("RENAME TABLE a TO s.b"), ["RENAME TABLE `shop`.`a` TO `s`.`b`"]);
    }

    #[test]
    fn failed_definition_has_the_outcome_that_servers_log_it_for() {
        let outcome = |text| outcome_of_failed(text, "shop", Backslash::default()).map(Cow::into_owned);
        let dropped = Some("DROP TABLE IF EXISTS `shop`.`a``b`".to_owned());
        assert_eq!(outcome("CREATE OR REPLACE TABLE `a``b` (id INT PRIMARY KEY, PRIMARY KEY (id))"), dropped);
        assert_eq!(outcome("/* x */ create or /* y */ replace table `shop` . `a``b` (id INT)"), dropped);
        assert_eq!(outcome("DROP TABLE a, b").as_deref(), Some("DROP TABLE a, b"));
        for text in ["CREATE TABLE a (id INT)", "ALTER TABLE a ADD b INT", "CREATE OR REPLACE VIEW v AS SELECT 1", ""] {
            assert_eq!(outcome(text), None, "{text}");
        }
        assert_eq!(outcome("CREATE OR REPLACE TEMPORARY TABLE a (id INT)"), None);
    }
}
