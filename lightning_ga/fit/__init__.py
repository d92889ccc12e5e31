"""One fit: windows at work, retries after out-of-memory errors, the check of exactness, BatchNorm."""
