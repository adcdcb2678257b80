"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- numbers and shapes ----------------------------------------------------------------------------------------

function bytes(count) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(count) >= unit) return `${(count / unit).toFixed(count / unit >= 100 ? 0 : 2)} ${name}`;
  }
  return `${Math.round(count)} B`;
}
function seconds(count) {
  if (count >= 1) return `${count.toPrecision(3)} s`;
  return count >= 1e-3 ? `${(count * 1e3).toPrecision(3)} ms` : `${(count * 1e6).toPrecision(3)} µs`;
}
const percent = (share, digits = 1) => `${(share * 100).toFixed(digits)} %`;
const color = (name) => `var(--${name})`;

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}
function tag(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}
function canvas(parent, width, height, label) {
  parent.textContent = "";
  return element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parent);
}
function ticks(most, count = 5) {
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough) || rough;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}
function byteTicks(most) {
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find((u) => most >= u) || 1;
  return ticks(most / unit).map((t) => t * unit);
}

// ---- the headline's figures ------------------------------------------------------------------------------------

function drawTiles() {
  const peak = data.measuredPeak ?? data.predictedPeak, saved = 1 - peak / data.plainPeak;
  const tiles = [
    [bytes(peak), data.measuredPeak === null ? "peak of the planned step, predicted" : "peak of the planned step, measured"],
    [bytes(data.plainPeak), data.numRecomputed ? `plain: ${percent(saved, 0)} more than that is saved` : "plain step"],
    [data.numRecomputed ? `+${percent(data.overhead)}` : "none", "time for recomputation"],
    [String(data.batchSize), "samples in a batch"],
    [bytes(data.budget), "budget"],
  ];
  if (data.numRecomputed) tiles[1][1] = `plain step; ${percent(saved, 0)} of it is saved`;
  if (data.budget > 2 ** 60) tiles.pop();
  if (data.run.samples_per_second) tiles.push([data.run.samples_per_second.toPrecision(3), "samples a second in the run"]);
  for (const [value, words] of tiles) {
    const tile = tag("div", "", "tile");
    tile.append(tag("b", value), tag("span", words));
    $("tiles").append(tile);
  }
}

// ---- memory over the step --------------------------------------------------------------------------------------

const PARTS = ["parameters and buffers", "gradients of parameters", "optimizer and the rest outside", "the batch",
  "activations", "at work: gradients of activations, workspaces"];

for (const view of Object.values(data.views)) {
  const alive = new Float64Array(view.memory.length + 1);
  for (const [, , size, start, end] of view.stays) { alive[start] += size; alive[end] -= size; }
  for (let i = 1; i < alive.length; i++) alive[i] += alive[i - 1];
  view.parts = view.memory.map((total, i) => {
    const inputs = view.fixed.inputs + view.handedOn[i];
    const known = [view.fixed.model, view.gradients[i], Math.max(0, view.fixed.outside), inputs, alive[i]];
    return [...known, Math.max(0, total - known.reduce((a, b) => a + b, 0))];
  });
  view.seconds = view.ends[view.ends.length - 1] || 1;
  view.peakAt = view.memory.indexOf(Math.max(...view.memory));
}
const moment = (view, i) => (i ? view.ends[i - 1] : 0);

let shown = "planned";
let chosen = null;

function drawMemory() {
  const width = 820, height = 470, left = 62, bottom = 34, top = 16, right = 8;
  const view = data.views[shown], other = data.views[shown === "planned" ? "plain" : "planned"];
  const svg = canvas($("memory"), width, height, "memory over the step");
  const longest = Math.max(view.seconds, other.seconds);
  const showsBudget = data.budget < 2 * Math.max(...data.views.plain.memory);
  const most = Math.max(...view.memory, ...other.memory, showsBudget ? data.budget : 0) * 1.06;
  const x = (t) => left + (t / longest) * (width - left - right);
  const y = (m) => height - bottom - (m / most) * (height - bottom - top);
  for (const t of byteTicks(most)) {
    element("line", { x1: left, x2: width - right, y1: y(t), y2: y(t), class: "grid" }, svg);
    element("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, svg, t ? bytes(t).replace(".00", "") : "0");
  }
  for (const t of ticks(longest, 6)) element("text", { x: x(t), y: height - 14, "text-anchor": "middle" }, svg, t ? seconds(t) : "0");
  const base = view.memory.map(() => 0);
  PARTS.forEach((_, p) => {
    const lower = base.slice();
    view.parts.forEach((parts, i) => { base[i] += parts[p]; });
    element("path", { d: band(view, lower, base, x, y), fill: color(`c${p}`), "fill-opacity": p === 4 ? .85 : .9 }, svg);
  });
  element("path", { d: outline(other, x, y), fill: "none", stroke: color("plain"), "stroke-width": 1.6 }, svg);
  if (showsBudget) {
    element("line", { x1: left, x2: width - right, y1: y(data.budget), y2: y(data.budget), stroke: color("limit"),
      "stroke-width": 1.6, "stroke-dasharray": "6 4" }, svg);
    element("text", { x: width - right, y: y(data.budget) - 5, "text-anchor": "end", style: `fill: ${color("limit")}` }, svg,
      `budget ${bytes(data.budget)}`);
  }
  const turn = x(moment(view, view.turn));
  element("line", { x1: turn, x2: turn, y1: top, y2: height - bottom, stroke: color("ink"), "stroke-dasharray": "2 3", "stroke-opacity": .5 }, svg);
  element("text", { x: turn - 6, y: top + 2, "text-anchor": "end" }, svg, "forward");
  element("text", { x: turn + 6, y: top + 2 }, svg, "backward");
  const cursor = element("line", { y1: top, y2: height - bottom, stroke: color("ink"), "stroke-width": 1.4 }, svg);
  const dot = element("circle", { r: 4, fill: color("ink") }, svg);
  const hit = element("rect", { x: left, y: 0, width: width - left - right, height, fill: "transparent" }, svg);
  function point(i) {
    chosen = i;
    const at = x((moment(view, i) + view.ends[i]) / 2);
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    dot.setAttribute("cx", at); dot.setAttribute("cy", y(view.memory[i]));
    tell(view, i);
  }
  hit.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const time = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * longest;
    point(at(view, Math.max(0, time)));
  });
  hit.addEventListener("pointerleave", () => point(view.peakAt));
  point(view.peakAt);
}
function at(view, time) {  // the last action that takes time and has begun; discards take none
  let low = 0, high = view.ends.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (view.ends[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}
function band(view, lower, upper, x, y) {
  let forth = "", back = "";
  view.memory.forEach((_, i) => {
    const begin = x(moment(view, i)).toFixed(1), end = x(view.ends[i]).toFixed(1);
    if (begin === end && i % 7) return;
    forth += `${forth ? "L" : "M"}${begin},${y(upper[i]).toFixed(1)}L${end},${y(upper[i]).toFixed(1)}`;
    back = `L${end},${y(lower[i]).toFixed(1)}L${begin},${y(lower[i]).toFixed(1)}${back}`;
  });
  return `${forth}${back}Z`;
}
function outline(view, x, y) {
  return view.memory.map((m, i) =>
    `${i ? "L" : "M"}${x(moment(view, i)).toFixed(1)},${y(m).toFixed(1)}L${x(view.ends[i]).toFixed(1)},${y(m).toFixed(1)}`).join("");
}
const ACTIONS = { F: "runs", R: "recomputes", B: "backward of", D: "discards", T: "discards the tape of" };

function tell(view, i) {
  const panel = $("alive");
  panel.textContent = "";
  const node = view.nodes[i], where = i === view.peakAt ? "the peak: " : "";
  panel.append(tag("h3", `${bytes(view.memory[i])} — ${where}${ACTIONS[view.kinds[i]]} ${view.names[node]}`));
  panel.append(tag("p", `at ${seconds(moment(view, i))} of ${seconds(view.seconds)}, ${shown} step`));
  const rows = PARTS.map((name, p) => [name, view.parts[i][p], `c${p}`]).filter(([, size], p) => size && p !== 4);
  const of = new Map();
  for (const [n, , size, start, end] of view.stays) {
    if (start <= i && i < end) of.set(view.blockOf[n], (of.get(view.blockOf[n]) || 0) + size);
  }
  const blocks = [...of.entries()].sort((a, b) => b[1] - a[1]);
  const few = blocks.slice(0, 7).map(([b, size]) => [`activations of ${view.blocks[b] || "the module"}`, size, "c4"]);
  const rest = blocks.slice(7).reduce((sum, [, size]) => sum + size, 0);
  const others = `activations of ${blocks.length - 7} other modules`;
  const all = [...rows, ...few].sort((a, b) => b[1] - a[1]);
  if (rest) all.push([others, rest, "c4"]);
  const most = Math.max(...all.map((r) => r[1]), 1);
  for (const [name, size, hue] of all) {
    const row = tag("div", "", "row"), bar = tag("i");
    bar.style.width = `${(size / most) * 100}%`;
    bar.style.background = color(hue);
    const label = tag("span", name);
    label.title = name;
    row.append(label, tag("b", bytes(size)), bar);
    panel.append(row);
  }
}
function drawLegend() {
  PARTS.forEach((name, p) => {
    const item = tag("span"), chip = tag("span", "", "chip");
    chip.style.background = color(`c${p}`);
    item.append(chip, document.createTextNode(name));
    $("legend").append(item);
  });
}

// ---- the schedule ----------------------------------------------------------------------------------------------

function drawSchedule() {
  const view = data.views[shown], rows = view.blocks.length;
  const longest = Math.max(...view.blocks.map((b) => b.length), 6);
  const left = Math.min(230, 20 + longest * 6.6), width = 1130, rowHeight = rows > 24 ? 15 : 20, bottom = 26, right = 8;
  const height = rows * rowHeight + bottom;
  const svg = canvas($("schedule"), width, height, "when each module's results are in memory");
  const x = (t) => left + (t / view.seconds) * (width - left - right);
  const changes = view.blocks.map(() => new Map());
  for (const [n, , size, start, end] of view.stays) {
    const own = changes[view.blockOf[n]];
    own.set(start, (own.get(start) || 0) + size);
    own.set(end, (own.get(end) || 0) - size);
  }
  view.blocks.forEach((name, b) => {
    const row = b * rowHeight;
    element("text", { x: left - 8, y: row + rowHeight / 2 + 4, "text-anchor": "end", class: "ink" }, svg, name || "module");
    element("rect", { x: left, y: row + 1, width: width - left - right, height: rowHeight - 2, fill: color("faint") }, svg);
    const places = [...changes[b].keys()].sort((p, q) => p - q);
    let level = 0, most = 0;
    for (const place of places) { level += changes[b].get(place); most = Math.max(most, level); }
    level = 0;
    places.forEach((place, k) => {
      level += changes[b].get(place);
      const begin = x(moment(view, place)), end = x(k + 1 < places.length ? moment(view, places[k + 1]) : view.seconds);
      if (level <= 0 || end - begin < .3) return;
      const rect = element("rect", { x: begin, y: row + 1, width: end - begin, height: rowHeight - 2,
        fill: `rgba(var(--heat), ${(0.1 + 0.75 * level / most).toFixed(2)})` }, svg);
      hover(rect, `${name}: ${bytes(level)} in memory from ${seconds(moment(view, place))}`);
    });
  });
  const hues = { F: "ink", R: "again", B: "back" };
  const marks = new Map();  // merged where they touch
  view.kinds.split("").forEach((kind, i) => {
    if (!(kind in hues) || view.ends[i] === moment(view, i)) return;
    const b = view.blockOf[view.nodes[i]], begin = x(moment(view, i)), end = x(view.ends[i]), last = marks.get(b);
    if (last && last.kind === kind && begin - last.end < .6) { last.end = end; return; }
    if (last) stroke(b, last);
    marks.set(b, { kind, begin, end });
  });
  function stroke(b, mark) {
    element("rect", { x: mark.begin, y: b * rowHeight + rowHeight / 2 - 2, width: Math.max(1.6, mark.end - mark.begin),
      height: 4, fill: color(hues[mark.kind]), "pointer-events": "none" }, svg);
  }
  marks.forEach((mark, b) => stroke(b, mark));
  const turn = x(moment(view, view.turn));
  element("line", { x1: turn, x2: turn, y1: 0, y2: height - bottom, stroke: color("ink"), "stroke-dasharray": "2 3", "stroke-opacity": .5 }, svg);
  for (const t of ticks(view.seconds, 7)) element("text", { x: x(t), y: height - 8, "text-anchor": "middle" }, svg, t ? seconds(t) : "0");
}

// ---- tables ----------------------------------------------------------------------------------------------------

function fill(table, heads, rows) {
  const head = tag("tr");
  heads.forEach(([name, className]) => head.append(tag("th", name, className || "")));
  table.append(head);
  for (const { cells, className } of rows) {
    const row = tag("tr", "", className || "");
    cells.forEach((cell, i) => {
      const place = tag("td", typeof cell === "string" ? cell : "", heads[i][1] || "");
      if (typeof cell !== "string") place.append(cell);
      row.append(place);
    });
    table.append(row);
  }
}
const kinds = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([k, c]) => `${c} ${k}`).join(", ") || "–";

function drawShares() {
  const shares = data.shares.filter((s) => s.kept_bytes || s.recomputed_bytes || s.recomputed_seconds);
  const most = Math.max(...shares.map((s) => s.kept_bytes + s.recomputed_bytes), 1);
  const price = (time, size) => (size > most / 1e4 ? seconds(time / (size / 2 ** 30)) : "–");  // of a few bytes: nonsense
  $("prices").textContent = data.prices;
  fill($("shares"), [["module", "left"], ["", "meter left"], ["kept"], ["recomputed"], ["runs again", "left"], ["for"],
    ["price of a GiB"], ["price of the kept"]],
    shares.map((s) => {
      const meter = tag("div");
      for (const [size, hue] of [[s.kept_bytes, "plan"], [s.recomputed_bytes, "again"]]) {
        const part = tag("i");
        part.style.width = `${(size / most) * 100}%`;
        part.style.background = color(hue);
        meter.append(part);
      }
      return { cells: [s.name || "module", meter, s.kept_bytes ? bytes(s.kept_bytes) : "–",
        s.recomputed_bytes ? bytes(s.recomputed_bytes) : "–", kinds(s.recomputed_kinds),
        s.recomputed_seconds ? `+${seconds(s.recomputed_seconds)}` : "–", price(s.recomputed_seconds, s.recomputed_bytes),
        price(s.kept_seconds, s.kept_bytes)] };
    }));
}

function drawCandidates() {
  const all = data.candidates;
  if (all.length < 2) { $("candidates-section").remove(); return; }
  $("choice").textContent = data.choice;
  fill($("candidate-table"), [["batch"], ["plain peak"], ["planned peak"], ["measured"], ["overhead"], ["samples a second"], ["", "left"]],
    all.map((c) => ({
      className: c.batch_size === data.batchSize ? "chosen" : c.fits ? "" : "misses",
      cells: [String(c.batch_size), bytes(c.plain_peak_bytes), bytes(c.predicted_peak_bytes),
        c.measured_peak_bytes === null ? "" : bytes(c.measured_peak_bytes),
        c.recompute_overhead === null ? "" : percent(c.recompute_overhead),
        c.samples_per_second === null ? "" : c.samples_per_second.toPrecision(4),
        c.batch_size === data.batchSize ? "chosen" : c.fits ? "fits" : c.reason || "does not fit"],
    })));
  const width = 1130, height = 230, left = 62, bottom = 34, top = 14, right = 20;
  const svg = canvas($("candidates"), width, height, "samples a second over the batch size");
  const largest = Math.max(...all.map((c) => c.batch_size)) * 1.04;
  const fits = all.filter((c) => c.fits && c.samples_per_second !== null);
  const plain = all.filter((c) => c.plain_peak_bytes <= data.budget);
  const fastest = Math.max(...fits.map((c) => c.samples_per_second), ...all.map((c) => c.plain_samples_per_second)) * 1.1;
  const x = (b) => left + (b / largest) * (width - left - right), y = (r) => height - bottom - (r / fastest) * (height - bottom - top);
  for (const t of ticks(fastest, 4)) {
    element("line", { x1: left, x2: width - right, y1: y(t), y2: y(t), class: "grid" }, svg);
    element("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, svg, String(+t.toPrecision(6)));
  }
  for (const t of ticks(largest, 8)) element("text", { x: x(t), y: height - 14, "text-anchor": "middle" }, svg, String(t));
  element("text", { x: width - right, y: height - 1, "text-anchor": "end" }, svg, "batch size");
  element("text", { x: left, y: 8 }, svg, "samples a second");
  for (const [points, key, hue] of [[all, "plain_samples_per_second", "plain"], [fits, "samples_per_second", "plan"]]) {
    element("polyline", { points: points.map((c) => `${x(c.batch_size)},${y(c[key])}`).join(" "), fill: "none",
      stroke: color(hue), "stroke-width": 2, "stroke-dasharray": hue === "plain" ? "4 4" : "none" }, svg);
    for (const c of points) {
      const isOpen = hue === "plain" && !plain.includes(c);
      const isChosen = hue === "plan" && c.batch_size === data.batchSize;
      const dot = element("circle", { cx: x(c.batch_size), cy: y(c[key]), r: isChosen ? 6.5 : 4,
        fill: isOpen ? color("card") : color(hue), stroke: color(hue), "stroke-width": 1.5 }, svg);
      hover(dot, `batch ${c.batch_size}, ${hue === "plain" ? "plain" : "planned"}: ${c[key].toPrecision(4)} samples a second, ` +
        bytes(hue === "plain" ? c.plain_peak_bytes : c.predicted_peak_bytes) + (isOpen ? ", does not fit" : ""));
    }
  }
  element("text", { x: x(data.batchSize), y: y(fits.find((c) => c.batch_size === data.batchSize)?.samples_per_second || 0) - 12,
    "text-anchor": "middle", class: "ink" }, svg, `chosen: ${data.batchSize}`);
}

function drawPeaks() {
  const bars = [["plain step, predicted", data.plainPeak, "plain"], ["planned step, predicted", data.predictedPeak, "plan"]];
  if (data.measuredPeak !== null) bars.push(["planned step, measured", data.measuredPeak, "back"]);
  if (data.run.peak_bytes) bars.push(["the run's steps, measured", data.run.peak_bytes, "back"]);
  const width = 1130, rowHeight = 30, left = 190, right = 110, height = bars.length * rowHeight + 8;
  const svg = canvas($("peaks"), width, height, "predicted and measured peaks");
  const showsBudget = data.budget < 1.2 * data.plainPeak;
  const most = Math.max(...bars.map((b) => b[1]), showsBudget ? data.budget : 0);
  const x = (m) => left + (m / most) * (width - left - right);
  bars.forEach(([name, size, hue], i) => {
    element("text", { x: left - 10, y: i * rowHeight + 20, "text-anchor": "end", class: "ink" }, svg, name);
    element("rect", { x: left, y: i * rowHeight + 6, width: x(size) - left, height: 20, rx: 4, fill: color(hue) }, svg);
    element("text", { x: x(size) + 8, y: i * rowHeight + 20, class: "ink" }, svg, bytes(size));
  });
  if (showsBudget) {
    element("line", { x1: x(data.budget), x2: x(data.budget), y1: 0, y2: height, stroke: color("limit"), "stroke-dasharray": "6 4", "stroke-width": 1.6 }, svg);
  }
  const off = data.measuredPeak === null ? null : data.predictedPeak / data.measuredPeak - 1;
  $("accuracy").textContent = off === null ? "The step was not measured again." :
    `The prediction is off by ${(off * 100).toFixed(2)} %, ${Math.abs(data.predictedPeak - data.measuredPeak).toLocaleString("en")} bytes` +
    (showsBudget ? "; the dashed line is the budget." : ".");
}

// ---- together --------------------------------------------------------------------------------------------------

function hover(shape, text) {
  shape.addEventListener("pointermove", (event) => {
    const tip = $("tip");
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 330)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  shape.addEventListener("pointerleave", () => { $("tip").hidden = true; });
}
function show(which) {
  shown = which;
  for (const name of ["planned", "plain"]) $(`show-${name}`).setAttribute("aria-pressed", String(name === which));
  drawMemory();
  drawSchedule();
}
$("show-planned").addEventListener("click", () => show("planned"));
$("show-plain").addEventListener("click", () => show("plain"));
drawTiles();
drawLegend();
show("planned");
drawShares();
drawCandidates();
drawPeaks();
