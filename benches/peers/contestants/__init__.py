"""Those that ``llorch bench peers`` measures side by side, each in a process of its own."""
