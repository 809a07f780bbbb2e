"""Downloads models and datasets from the Hugging Face hub, and uploads the results of runs, through
huggingface_hub; both are verified.
"""
