"""The catalog as a database: tables, connection, revisions, seeds, stored plans, import and export."""
