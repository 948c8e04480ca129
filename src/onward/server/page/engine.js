// The live view of an engine.

const LOOKS = 60; // points of the curve, about one a second
const rates = [];
let last = null; // {tokens, at}: the count at the last look

// stats: of one model, as /stats has them.
export function showEngine(stats) {
  drawPace(stats);
  drawBlocks(stats);
  numbers({
    "Generated tokens per second": stats.tokens_per_second.toFixed(0),
    "Prompt tokens per second": stats.prompt_tokens_per_second.toFixed(0),
    "Running requests": stats.running,
    "Waiting requests": stats.waiting,
    "Cache used": percent(stats.blocks_used / stats.blocks),
    "Prompt tokens found in the cache": percent(stats.hit_rate),
    "Generated tokens": stats.tokens.toLocaleString("en"),
  });
}

// Another model's numbers follow: they make no curve with those before.
export function forgetEngine() {
  rates.length = 0;
  last = null;
}

function drawPace(stats) {
  const now = { tokens: stats.tokens, at: performance.now() };
  // A server that was restarted counts from zero.
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
  const shares = [counts.used, counts.cached, counts.free].map((count) => percent(count / stats.blocks));
  blocks.setAttribute("aria-label", `Cache: ${shares[0]} used, ${shares[1]} kept for reuse, ${shares[2]} free`);
}

function percent(share) {
  return share > 0 && share < 0.01 ? "< 1%" : `${(100 * share).toFixed(0)}%`;
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
