"""What every room uses: errors, events, files, text, child processes, causes and translations."""
