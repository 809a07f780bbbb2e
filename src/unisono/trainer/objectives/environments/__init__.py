"""What the model acts in during an answer: classes of the user's own whose methods are tools, in
processes of their own, and the turns of an answer.
"""
