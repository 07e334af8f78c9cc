"""Why a serving question has no plan, and what would do."""
