"""The policy of `BlockWindows`: where blocks lie, and which window shows which of them."""
