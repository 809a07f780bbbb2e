"""The interfaces for people and programs: commands, the API, doctor, drills, board and servers."""
