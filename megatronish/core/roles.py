"""Roles of messages, with the names that other formats have for them, and names of what the assistant thought."""

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatgpt"),
    "tool": ("tool", "function", "observation", "function_response", "ipython"),
}
"""What each role is called in data of others."""
SAME_ROLE = {name: role for role, names in ROLE_NAMES.items() for name in names if name != role}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of what the assistant thought before its content, of which the first counts."""
