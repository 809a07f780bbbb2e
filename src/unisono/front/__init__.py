"""What people and programs talk to: commands, the API, doctor, drills, board and server."""
