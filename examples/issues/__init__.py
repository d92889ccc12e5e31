"""Published reports on gradient accumulation, each reproduced in a short script that prints theirs and ours."""
