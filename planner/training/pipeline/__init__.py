"""Pipeline schedules: orders, closed forms, simulation."""
