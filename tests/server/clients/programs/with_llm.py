import os
import tempfile
from pathlib import Path

from contract import HI, QUESTION, URL, report, weather

with tempfile.TemporaryDirectory() as folder:
    models = [
        f"- model_id: on-{name}\n  model_name: {name}\n  api_base: {URL}\n  supports_tools: true\n"
        for name in ("demo", "agent")
    ]
    Path(folder, "extra-openai-models.yaml").write_text("".join(models))
    os.environ["LLM_USER_PATH"] = folder

    import llm

    demo, agent = llm.get_model("on-demo"), llm.get_model("on-agent")
    options = {"temperature": 0, "max_tokens": 40}
    text = demo.prompt(HI, stream=False, **options).text()
    answer = "".join(agent.chain(QUESTION, tools=[weather], stream=False))
    report(text, demo.prompt(HI, **options), answer, agent.chain(QUESTION, tools=[weather]))
