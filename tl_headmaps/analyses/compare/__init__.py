"""What is different between two results of one kind?"""
