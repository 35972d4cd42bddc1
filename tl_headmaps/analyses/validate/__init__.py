"""Do heads write in prompts what their weights say?"""
