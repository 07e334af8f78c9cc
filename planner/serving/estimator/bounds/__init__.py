"""What nothing exceeds: rates of a worker under any schedule, and of devices whose resources overlapped wholly."""
