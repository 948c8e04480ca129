// The live view of an engine.

const LOOKS = 60; // that the curve shows, about one a second
const rates = [];
let last = null; // {tokens, at}: the count at the last look

// stats: of one model, as /stats has them.
export function showEngine(stats) {
  drawPace(stats);
  drawBlocks(stats);
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
}

// Another model's numbers follow: they make no curve with those before.
export function forgetEngine() {
  rates.length = 0;
  last = null;
}

function drawPace(stats) {
  const now = { tokens: stats.tokens, at: performance.now() };
  // A server that has begun anew counts from zero.
  if (last && now.tokens >= last.tokens) rates.push((1000 * (now.tokens - last.tokens)) / (now.at - last.at));
  last = now;
  rates.splice(0, Math.max(0, rates.length - LOOKS));
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, at) => `${((LOOKS - rates.length + at) * 120) / (LOOKS - 1)},${31 - (30 * rate) / most}`);
  document.querySelector("#pace polyline").setAttribute("points", points.join(" "));
}

function drawBlocks(stats) {
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
