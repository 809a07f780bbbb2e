"""What facts mean: pure functions from RunFacts to findings, by topic. Which of them holds is decided in judge.py."""
