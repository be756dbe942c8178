# SPDX-License-Identifier: Apache-2.0
"""Checks whether the account of a PostgreSQL sink has the required privileges, by planning statements without
running them.
"""

from collections.abc import Sequence

from penstock.errors import PrivilegeMissing
from penstock.model import TableName
from penstock.sinks.postgres.connection import Session
from penstock.sinks.postgres.tables import quoted, table_sql


def prove_may_write(session: Session, name: TableName, privileges: Sequence[str], *, alters: bool) -> None:
    """Raise PrivilegeMissing if the account lacks one of these privileges on a table.

    The account must own a table that is to be altered, and must be able to create a table that does not
    exist.
    """
    tables = session.run(
        "SELECT has_schema_privilege(n.oid, 'USAGE'), pg_has_role(c.relowner, 'USAGE'), ARRAY(SELECT p FROM"
        " unnest(%s::text[]) p WHERE NOT has_table_privilege(c.oid, p)) FROM pg_class c JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        (list(privileges), name.database, name.table),
    )
    if not tables:
        _prove_may_create(session, name)
        return
    ((may_use_schema, owns_table, missing),) = tables
    if not may_use_schema:
        raise _missing(session, "USAGE", f"SCHEMA {quoted(name.database)}")
    if missing:
        raise _missing(session, ", ".join(missing), table_sql(name))
    if alters and not owns_table:
        raise PrivilegeMissing(
            f"{_account(session)} does not own {table_sql(name)}, which is to be altered",
            hint=f"ALTER TABLE {table_sql(name)} OWNER TO {_account(session)}; or alter the table by hand",
        )


def _prove_may_create(session: Session, name: TableName) -> None:
    schemas = session.run(
        "SELECT has_schema_privilege(oid, 'USAGE') AND has_schema_privilege(oid, 'CREATE')"
        " FROM pg_namespace WHERE nspname = %s",
        (name.database,),
    )
    if schemas and not schemas[0][0]:
        raise _missing(session, "USAGE, CREATE", f"SCHEMA {quoted(name.database)}")
    ((database, may_create),) = session.run(
        "SELECT current_database(), has_database_privilege(current_database(), 'CREATE')"
    )
    if not schemas and not may_create:
        raise _missing(session, "CREATE", f"DATABASE {quoted(database)}")


def _missing(session: Session, privileges: str, object_sql: str) -> PrivilegeMissing:
    account = _account(session)
    return PrivilegeMissing(
        f"{account} has no privilege {privileges} on {object_sql}",
        hint=f"GRANT {privileges} ON {object_sql} TO {account}",
    )


def _account(session: Session) -> str:
    ((name,),) = session.run("SELECT current_user")
    return quoted(name)
