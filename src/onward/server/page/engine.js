// The live view of an engine.

const SECONDS = 60;
const rates = [];

// stats: of one model, as /stats has them.
export function showEngine(stats) {
  rates.push(stats.running ? stats.tokens_per_second : 0);
  rates.splice(0, rates.length - SECONDS);
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, at) => `${((SECONDS - rates.length + at) * 120) / (SECONDS - 1)},${31 - (30 * rate) / most}`);
  document.querySelector("#pace polyline").setAttribute("points", points.join(" "));

  numbers({
    "Tokens/s": stats.tokens_per_second.toFixed(0),
    "Prompt tokens/s": stats.prompt_tokens_per_second.toFixed(0),
    "Rows": stats.sequences,
    "Requests running": stats.running,
    "Requests waiting": stats.waiting,
    "Blocks used": `${stats.blocks_used} of ${stats.blocks}`,
    "Found in the cache": `${(100 * stats.hit_rate).toFixed(0)} %`,
    "Tokens so far": stats.tokens,
  });

  const blocks = document.querySelector("#blocks");
  const counts = { used: stats.blocks_used, cached: stats.blocks_cached, free: stats.blocks_free };
  for (const [name, count] of Object.entries(counts)) blocks.querySelector(`.${name}`).style.flexGrow = count;
  const told = Object.entries(counts).map(([name, count]) => `${count} ${name}`);
  blocks.setAttribute("aria-label", `Blocks of the cache: ${told.join(", ")}`);
}

function numbers(values) {
  const list = document.querySelector("#numbers");
  for (const [name, value] of Object.entries(values)) {
    let cell = list.querySelector(`[data-name="${name}"]`);
    if (!cell) {
      const term = document.createElement("dt");
      term.textContent = name;
      cell = document.createElement("dd");
      cell.dataset.name = name;
      list.append(term, cell);
    }
    cell.textContent = value;
  }
}
