"""Parts of machines that the catalog knows from their makers: processors of hosts, drives, MIG profiles."""
