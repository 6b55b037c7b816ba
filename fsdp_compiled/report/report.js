"use strict";
// Draws what `figures` of page.py made: lanes and memory on uPlot's axes, tables, the map and the texts.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, text, kind) => { const one = document.createElement(tag); if (text !== undefined) one.textContent = text; if (kind) one.className = kind; return one; };
const bytes = n => { let i = 0; while (Math.abs(n) >= 1024 && i < 3) { n /= 1024; i++; } return (i ? n.toFixed(1) : n.toFixed(0)) + " " + ["B", "KiB", "MiB", "GiB"][i]; };
const time = s => s >= 1 ? s.toPrecision(4) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(4) + " ms" : (s * 1e6).toPrecision(4) + " us";
const share = x => (x < 0.01 && x > 0 ? (100 * x).toPrecision(2) : (100 * x).toFixed(1)) + " %";
const EXPOSED = "exposed";

// ---- the headline
const head = data.headline, measured = data.measured;
$("title").textContent = "fsdp_compiled: a step, " + data.title;
function tile(name, value, bad) { const one = make("div", undefined, "tile" + (bad ? " bad" : "")); one.append(make("b", value), make("span", name)); $("tiles").append(one); }
tile("step, predicted", time(head.seconds));
if (measured) tile("step, measured", time(head["measured seconds"]));
const exposed = head.seconds ? head.exposed / head.seconds : 0;
tile("exposed communication, predicted", share(exposed), exposed > 0.1);
if (measured) tile("exposed, measured", share(head["measured exposed"] / head["measured seconds"]));
if (head.utilisation !== null) tile("utilisation of the assumed rate", share(head.utilisation));
tile("peak of a rank, predicted", head.peak === null ? "not known" : bytes(head.peak));
tile("between steps", bytes(head.between));

// ---- units, their colours, and what is linked to what
const names = [...new Set([...data.units.map(u => u.unit), ...data.predicted.unit, ...(measured ? measured.unit : [])])];
const number = new Map(names.map((name, i) => [name, i]));
const colour = (name, alpha = 1) => `hsl(${(number.get(name) ?? 0) * 137.508 % 360} ${css("--unit")} / ${alpha})`;
const linked = (a, b) => a === b || data.blocks[a] === b || data.blocks[b] === a;
let hot = null, wanted = "";
const lit = name => hot !== null ? linked(name, hot) : !wanted || name.toLowerCase().includes(wanted);

// ---- lanes
const rows = []; // of the lanes chart, from the top: {name, of, lane}
for (const [title, of] of [["measured", measured], ["predicted", data.predicted]]) {
  if (!of) continue;
  for (const lane of ["compute", "gathers", "reductions", "tp", "host"])
    if (of.lane.includes(lane)) rows.push({name: measured ? `${title}: ${lane}` : lane, of, lane, spans: []});
}
const find = (of, lane) => rows.find(row => row.of === of && row.lane === lane);
const arrows = []; // from the end of a collective to the moment that it was waited for
for (const of of [measured, data.predicted]) {
  if (!of) continue;
  of.start.forEach((start, i) => {
    const row = find(of, of.lane[i]), span = {start, end: of.end[i], unit: of.unit[i], node: of.node[i], bytes: of.bytes[i], lane: of.lane[i]};
    row.spans.push(span);
    if (of.wait[i]) {
      const [from, to] = of.wait[i], target = find(of, "compute");
      if (to > from && target) target.spans.push({start: from, end: to, unit: span.unit, node: "waits for " + span.node, lane: EXPOSED});
      if (target) arrows.push({from: row, at: span.end, to: target, when: to, unit: span.unit});
    }
  });
}
for (const row of rows) row.spans.sort((a, b) => a.start - b.start);
const whole = Math.max(head.seconds, measured ? head["measured seconds"] : 0) || 1e-9;
const exposures = rows.length ? rows.flatMap(r => r.spans.filter(s => s.lane === EXPOSED)).sort((a, b) => a.start - b.start) : [];

const sync = uPlot.sync("step");
const charts = [];
let busy = false;
const axis = () => ({stroke: () => css("--soft"), grid: {stroke: () => css("--line"), width: 1}, ticks: {stroke: () => css("--line"), width: 1}});
const labels = Math.min(150, Math.max(84, ...rows.map(row => row.name.length * 7 + 10)));
function shared(u, key) {
  if (key !== "x" || busy) return;
  busy = true;
  for (const other of charts) if (other !== u && (other.scales.x.min !== u.scales.x.min || other.scales.x.max !== u.scales.x.max)) other.setScale("x", {min: u.scales.x.min, max: u.scales.x.max});
  busy = false;
}
const width = () => Math.max(260, $("lanes").clientWidth);
const HEIGHT = 34;

function drawLanes(u) {
  const c = u.ctx, box = u.bbox, px = devicePixelRatio || 1, h = box.height / rows.length;
  const x = v => u.valToPos(v, "x", true), {min, max} = u.scales.x;
  c.save(); c.beginPath(); c.rect(box.left, box.top, box.width, box.height); c.clip();
  c.font = `${11 * px}px system-ui, sans-serif`; c.textBaseline = "middle";
  rows.forEach((row, i) => {
    const top = box.top + i * h + 3 * px, tall = h - 6 * px;
    for (const s of row.spans) {
      if (s.end < min || s.start > max) continue;
      const left = Math.max(x(s.start), box.left), w = Math.max(Math.min(x(s.end), box.left + box.width) - left, px / 2);
      c.globalAlpha = lit(s.unit) ? 1 : 0.18;
      c.fillStyle = s.lane === EXPOSED ? css("--red") : colour(s.unit, s.lane === "compute" ? 1 : 0.6);
      c.fillRect(left, top, w, tall);
      const text = s.lane === EXPOSED ? "waits" : s.unit;
      if (w > 26 * px) { c.save(); c.beginPath(); c.rect(left, top, w - 2 * px, tall); c.clip(); c.fillStyle = "#fff"; c.fillText(text, left + 3 * px, top + tall / 2); c.restore(); }
    }
  });
  const seen = arrows.filter(a => a.when >= min && a.at <= max);
  const crowded = seen.length > 160;
  for (const a of seen) {
    if (crowded && !(hot !== null && linked(a.unit, hot))) continue;
    const i = rows.indexOf(a.from), j = rows.indexOf(a.to), down = j > i;
    const y1 = box.top + i * h + (down ? h - 3 * px : 3 * px), y2 = box.top + j * h + (down ? 3 * px : h - 3 * px), x1 = x(a.at), x2 = x(a.when);
    c.globalAlpha = lit(a.unit) ? 0.9 : 0.12; c.strokeStyle = c.fillStyle = css("--ink"); c.lineWidth = px;
    c.beginPath(); c.moveTo(x1, y1); c.lineTo(x2, y2); c.stroke();
    const t = Math.atan2(y2 - y1, x2 - x1), r = 5 * px;
    c.beginPath(); c.moveTo(x2, y2); c.lineTo(x2 - r * Math.cos(t - .4), y2 - r * Math.sin(t - .4)); c.lineTo(x2 - r * Math.cos(t + .4), y2 - r * Math.sin(t + .4)); c.fill();
  }
  c.restore();
}

function spanAt(u) {
  const {left, top} = u.cursor;
  if (left === null || left < 0 || top < 0) return null;
  const row = rows[Math.floor(top / (u.over.clientHeight / rows.length))], at = u.posToVal(left, "x");
  const near = (u.scales.x.max - u.scales.x.min) / u.over.clientWidth; // a pixel
  return row ? row.spans.find(s => s.start - near <= at && at <= s.end + near) ?? null : null;
}

let over = null; // the chart that the pointer is in
const lanes = new uPlot({
  width: width(), height: rows.length * HEIGHT + 40, legend: {show: false},
  scales: {x: {time: false, range: (u, a, b) => [a, b]}, y: {range: [0, rows.length]}},
  axes: [{...axis(), values: (u, v) => v.map(time), space: 90}, {...axis(), side: 3, size: labels, splits: () => rows.map((_, i) => i + .5), values: () => rows.map((_, i) => rows[rows.length - 1 - i].name), grid: {show: false}, ticks: {show: false}, font: "12px system-ui"}],
  series: [{}, {paths: () => null, points: {show: false}}],
  cursor: {y: false, sync: {key: sync.key}, drag: {x: true, y: false}, points: {show: false}},
  hooks: {draw: [drawLanes], setScale: [shared], setCursor: [u => { if (over !== u) return; const span = spanAt(u); point(span ? span.unit : null, span ? tipOf(span) : ""); }]},
}, [[0, whole], [0, 0]], $("lanes"));
charts.push(lanes);
const tipOf = s => [s.node || s.unit, s.node && s.unit !== s.node ? "unit " + s.unit : "", `${s.lane}: ${time(s.end - s.start)}, from ${time(s.start)}`, s.bytes ? `gives ${bytes(s.bytes[0])}, gets ${bytes(s.bytes[1])}` : ""].filter(Boolean).join("\n");

// ---- memory: kinds one on the other, the lowest first
const HUES = {state: 215, batch: 190, gathered: 140, fetched: 165, activations: 32, backward: 275, gradients: 330, update: 5, kernel: 255, wire: 52};
const kinds = Object.keys(data.memory.kinds);
const shade = (kind, alpha = 1) => `hsl(${HUES[kind] ?? 0} ${css("--unit")} / ${alpha})`;
const sums = []; kinds.forEach((kind, i) => sums.push(data.memory.kinds[kind].map((v, at) => v + (i ? sums[i - 1][at] : 0))));
const order = kinds.map((_, i) => i).reverse(); // the highest is drawn first, the others over it
const stepped = uPlot.paths.stepped({align: 1});
const times = data.memory.times, end = times.length ? [Math.max(head.seconds, times[times.length - 1])] : [];
const last = list => list.length ? [...list, list[list.length - 1]] : list;
let memory = null;
if (times.length) {
  const peakAt = (() => { const top = sums[sums.length - 1]; return top.indexOf(top.reduce((a, b) => Math.max(a, b), 0)); })();
  memory = new uPlot({
    width: width(), height: 260,
    scales: {x: {time: false, range: (u, a, b) => [a, b]}, y: {range: (u, a, b) => [0, b * 1.12 || 1]}},
    axes: [{...axis(), values: (u, v) => v.map(time), space: 90}, {...axis(), size: labels, incrs: Array.from({length: 50}, (_, i) => 2 ** i), values: (u, v) => v.map(bytes)}],
    series: [{label: "at", value: (u, v) => v === null ? "" : time(v)}, ...order.map(i => ({label: kinds[i], fill: () => shade(kinds[i]), stroke: () => shade(kinds[i]), width: 0, paths: stepped, points: {show: false}, value: (u, v, s, at) => at === null ? "" : bytes(data.memory.kinds[kinds[i]][Math.min(at, times.length - 1)])}))],
    cursor: {y: false, sync: {key: sync.key}, drag: {x: true, y: false}, points: {show: false}},
    hooks: {setScale: [shared], draw: [u => {
      const c = u.ctx, px = devicePixelRatio || 1, x = u.valToPos(times[peakAt], "x", true), box = u.bbox, y = u.valToPos(sums[sums.length - 1][peakAt], "y", true);
      if (x < box.left || x > box.left + box.width) return;
      c.save(); c.strokeStyle = c.fillStyle = css("--ink"); c.lineWidth = px; c.setLineDash([4 * px, 3 * px]);
      c.beginPath(); c.moveTo(x, box.top); c.lineTo(x, box.top + box.height); c.stroke();
      c.font = `600 ${12 * px}px system-ui, sans-serif`; const text = "peak " + bytes(head.peak), right = x + c.measureText(text).width + 8 * px < box.left + box.width;
      c.textAlign = right ? "left" : "right"; c.textBaseline = "bottom"; c.fillText(text, x + (right ? 5 : -5) * px, y - 2 * px); c.restore();
    }], setCursor: [u => { if (over !== u || u.cursor.left < 0) return; const at = Math.min(u.cursor.idx ?? 0, times.length - 1), place = data.memory.where[at]; point(names.includes(place) ? place : null, `${data.memory.nodes[at]}\n${place}\n${bytes(sums[sums.length - 1][at])} alive`); }]},
  }, [[...times, ...end], ...order.map(i => last(sums[i]))], $("memory"));
  charts.push(memory);
} else $("memory").textContent = "The memory of this program is not predicted.";
for (const u of charts) {
  u.over.addEventListener("mouseenter", () => over = u);
  u.over.addEventListener("mouseleave", () => { over = null; point(null, ""); });
}
function legend() { $("legend").innerHTML = ""; for (const [text, fill] of [["compute, coloured by unit", colour(names[Math.min(1, names.length - 1)])], ["communication, in its unit's colour", colour(names[Math.min(1, names.length - 1)], .6)], ["exposed: compute waits", css("--red")]]) { const one = make("span"), box = make("i"); box.style.background = fill; one.append(box, text); $("legend").append(one); } $("legend").append(make("span", "drag to zoom, double-click for the whole step")); }

// ---- the peak
if (data.peak) {
  $("peak").textContent = `peak: ${bytes(data.peak.bytes)} at ${data.peak.phase} of ${data.peak.where} (${data.peak.node}); its ${data.peak.tensors.length} largest tensors besides the state:`;
  for (const t of data.peak.tensors) {
    const row = make("tr"); row.dataset.unit = t.where;
    row.append(make("td", bytes(t.bytes), "n"), make("td", t.kind), make("td", t.where), make("td", `${t.node} ${t.shape}`), make("td", t.line || "inserted by a pass"));
    $("tensors").tBodies[0].append(row);
  }
}

// ---- units; neighbours of one form are one row, which opens
const COLUMNS = [["unit", x => x], ["parameters", x => x], ["gathered", bytes], ["held", bytes], ["compute", time], ["gathers", time], ["reductions", time], ["tp", time], ["host", time], ["exposed", time]].filter(([name]) => !["tp", "host"].includes(name) || data.units.some(u => u[name]));
{ const row = make("tr"); for (const [name] of COLUMNS) row.append(make("th", name === "held" ? "a rank holds" : name, name === "unit" ? "" : "n")); $("units").tHead.append(row); }
const form = u => u.unit.replace(/\d+/g, "#") + [u.parameters, u.gathered, u.held];
function unitRow(u, label, kind) {
  const row = make("tr", undefined, kind); row.dataset.unit = u.unit;
  for (const [name, text] of COLUMNS) { const cell = make("td", name === "unit" ? label : text(u[name]), (name === "unit" ? "" : "n") + (name === "exposed" && u[name] > 0 ? " red" : "")); row.append(cell); }
  return row;
}
for (let i = 0; i < data.units.length;) {
  let j = i + 1; while (j < data.units.length && form(data.units[j]) === form(data.units[i])) j++;
  const group = data.units.slice(i, j); i = j;
  if (group.length < 3) { group.forEach(u => $("units").tBodies[0].append(unitRow(u, u.unit))); continue; }
  const sum = {...group[0]}; for (const [name] of COLUMNS.slice(1)) sum[name] = group.reduce((a, u) => a + u[name], 0);
  const ends = group[group.length - 1].unit.match(/\d+(?=\D*$)/), row = unitRow(sum, `▸ ${group[0].unit}..${ends ? ends[0] : ""}  ×${group.length}`, "folded"), inside = group.map(u => unitRow(u, "    " + u.unit));
  row.tabIndex = 0; row.setAttribute("aria-expanded", "false"); row.dataset.units = JSON.stringify(group.map(u => u.unit)); inside.forEach(one => one.hidden = true);
  const toggle = () => { const shown = inside[0].hidden; inside.forEach(one => one.hidden = !shown); row.setAttribute("aria-expanded", shown); row.cells[0].textContent = row.cells[0].textContent.replace(/^./, shown ? "▾" : "▸"); };
  row.addEventListener("click", toggle); row.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(); } });
  $("units").tBodies[0].append(row, ...inside);
}

// ---- who holds what: a row for each parameter, a column for each rank along the shard axis; alike units once
const held = data.holders, mapRows = [];
{
  let before = null;
  for (const b of held.buffers) {
    const key = [b.unit.replace(/\d+/g, "#"), b.lies, b.each, b["by rows"]].join();
    if (before && before.key === key) { before.times++; before.last = b.unit; continue; }
    before = {key, times: 1, first: b.unit, last: b.unit, at: mapRows.length};
    for (const [name, offset, size, first] of b.slots) mapRows.push({name, offset, size, first, buffer: b, group: before});
  }
}
const columns = Math.min(held.ranks, 64), TALL = 13, map = $("map");
const held_by = (row, rank) => {
  if (!held.sharded) return 1;
  if (!row.size) return 0;
  if (row.buffer["by rows"]) { const each = Math.ceil(row.first / held.ranks); return Math.max(0, Math.min(row.first, (rank + 1) * each) - rank * each) / row.first; }
  const each = row.buffer.each; return Math.max(0, Math.min(row.offset + row.size, (rank + 1) * each) - Math.max(row.offset, rank * each)) / row.size;
};
const mapName = row => row.group.times > 1 ? `${row.name}  (×${row.group.times}, to ${row.group.last})` : row.name;
$("map-text").textContent = (held.sharded ? `Each parameter is a row, each of ${held.ranks} ranks along the shard axis a column` : `Every rank holds all of each parameter (${held.ranks} ranks)`) + (held.ranks > columns ? `, of which the first ${columns} are drawn` : "") + (held.replicas > 1 ? `; the same on each of ${held.replicas} replicas` : "") + (held.tp > 1 ? `; sizes are of one of ${held.tp} parts along tp` : "") + ". The darker, the larger the share; repeated blocks are drawn once.";
function drawMap() {
  const px = devicePixelRatio || 1, names = 330, w = Math.max(8, Math.min(60, (width() - names - 20) / columns)), W = names + columns * w, H = mapRows.length * TALL + 18;
  map.style.width = W + "px"; map.style.height = H + "px"; map.width = W * px; map.height = H * px;
  const c = map.getContext("2d"); c.scale(px, px); c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
  c.fillStyle = css("--soft"); for (let r = 0; r < columns; r += Math.ceil(26 / w)) c.fillText(String(r), names + r * w + 2, 9);
  mapRows.forEach((row, i) => {
    const y = 18 + i * TALL; c.globalAlpha = 1; c.fillStyle = lit(row.buffer.unit) ? css("--ink") : css("--soft"); c.fillText(mapName(row), 6, y + TALL / 2, names - 12);
    for (let r = 0; r < columns; r++) { const part = held_by(row, r); c.globalAlpha = part ? (lit(row.buffer.unit) ? 0.25 + 0.75 * part : 0.12) : 1; c.fillStyle = part ? colour(row.buffer.unit) : css("--panel"); c.fillRect(names + r * w, y, w - 1, TALL - 2); }
  });
  map.spot = e => { const rank = Math.floor((e.offsetX - names) / w), row = mapRows[Math.floor((e.offsetY - 18) / TALL)]; return row ? {row, rank: rank >= 0 && rank < columns ? rank : null} : null; };
}
map.addEventListener("mousemove", e => { const at = map.spot(e); point(at ? at.row.buffer.unit : null, at ? mapName(at.row) + (at.rank === null ? "" : `\nrank ${at.rank} holds ${share(held_by(at.row, at.rank))}`) : "", e); });
map.addEventListener("mouseleave", () => point(null, ""));

// ---- texts, as tabs
let shown = -1;
function unitsIn(line) { // what a line is about: units by name, or several as layers.1..30
  const range = line.match(/([A-Za-z_][\w.]*?)(\d+)\.\.(\d+)/);
  if (range) { const [a, b] = [+range[2], +range[3]].sort((x, y) => x - y), found = []; for (let i = a; i <= b && i - a < 4096; i++) if (number.has(range[1] + i)) found.push(range[1] + i); if (found.length) return found; }
  for (const word of line.match(/[A-Za-z_][\w.-]*/g) ?? []) if (number.has(word)) return [word];
  return [];
}
function showText(at) {
  shown = at; [...$("tabs").children].forEach((tab, i) => { tab.setAttribute("aria-selected", i === at); tab.tabIndex = i === at ? 0 : -1; });
  const parts = document.createDocumentFragment(), diff = data.texts[at].text.includes("\n@@ ");
  for (const line of data.texts[at].text.split("\n")) {
    if (wanted && !line.toLowerCase().includes(wanted)) continue;
    const row = make("div", undefined, "row" + (!diff ? "" : line[0] === "+" ? " plus" : line[0] === "-" ? " minus" : line.startsWith("@@") ? " at" : "")), found = unitsIn(line);
    if (found.length) row.dataset.units = JSON.stringify(found);
    if (wanted) { const i = line.toLowerCase().indexOf(wanted); row.append(line.slice(0, i), make("mark", line.slice(i, i + wanted.length)), line.slice(i + wanted.length)); } else row.textContent = line || " ";
    parts.append(row);
  }
  $("text").replaceChildren(parts);
}
data.texts.forEach((one, i) => { const tab = make("button", one.name); tab.setAttribute("role", "tab"); tab.addEventListener("click", () => showText(i)); $("tabs").append(tab); });
$("tabs").addEventListener("keydown", e => { const step = {ArrowRight: 1, ArrowLeft: -1}[e.key]; if (step) { e.preventDefault(); e.stopPropagation(); showText((shown + step + data.texts.length) % data.texts.length); $("tabs").children[shown].focus(); } });

// ---- one unit is pointed at, everywhere
function point(unit, tip, event) {
  const box = $("tip");
  box.hidden = !tip;
  if (tip) { box.textContent = tip; const x = event ? event.clientX : pointer[0], y = event ? event.clientY : pointer[1]; box.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8)) + "px"; box.style.top = Math.min(y + 16, innerHeight - box.offsetHeight - 8) + "px"; }
  if (unit === hot) return;
  hot = unit;
  for (const row of document.querySelectorAll("[data-unit], .row[data-units]")) row.classList.toggle("hot", hot !== null && (row.dataset.units ? JSON.parse(row.dataset.units) : [row.dataset.unit]).some(name => linked(name, hot)));
  lanes.redraw(false); drawMap();
}
let pointer = [0, 0];
addEventListener("mousemove", e => pointer = [e.clientX, e.clientY], true);
for (const part of ["units", "tensors", "text"]) {
  $(part).addEventListener("mouseover", e => { const row = e.target.closest("[data-unit], [data-units]"); point(row ? row.dataset.unit ?? JSON.parse(row.dataset.units)[0] : null, ""); });
  $(part).addEventListener("mouseleave", () => point(null, ""));
}

// ---- zoom, search, keys, theme, width
function view(min, max) { const size = Math.min(max - min, whole), from = Math.max(0, Math.min(min, whole - size)); lanes.setScale("x", {min: from, max: from + Math.max(size, whole * 1e-5)}); }
function zoom(by, to) { const {min, max} = lanes.scales.x, middle = to ?? (min + max) / 2, half = (max - min) * by / 2; view(middle - half, middle + half); }
function move(by) { const {min, max} = lanes.scales.x; view(min + (max - min) * by, max + (max - min) * by); }
let exposure = -1, chosen = -1;
function nextExposed() { if (!exposures.length) return; exposure = (exposure + 1) % exposures.length; const s = exposures[exposure], size = Math.max(s.end - s.start, whole * 1e-4) * 6; view((s.start + s.end - size) / 2, (s.start + s.end + size) / 2); point(s.unit, ""); }
function nextUnit(step) { chosen = (chosen + step + names.length) % names.length; point(null, ""); point(names[chosen], ""); document.querySelector("#units tr.hot")?.scrollIntoView({block: "nearest"}); }
function theme() { const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; document.documentElement.dataset.theme = dark ? "light" : "dark"; repaint(); }
function repaint() { legend(); charts.forEach(u => u.redraw(false)); for (const mark of document.querySelectorAll("#memory .u-marker")) mark.style.background = ""; kinds.length && memory.root.querySelectorAll(".u-series").forEach((row, i) => { if (i) row.querySelector(".u-marker").style.cssText = `background:${shade(kinds[order[i - 1]])}`; }); drawMap(); }
$("in").onclick = () => zoom(.5); $("out").onclick = () => zoom(2); $("whole").onclick = () => view(0, whole); $("next").onclick = nextExposed; $("theme").onclick = theme;
$("search").addEventListener("input", e => {
  wanted = e.target.value.trim().toLowerCase();
  for (const row of $("tensors").tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  showText(shown); lanes.redraw(false); drawMap();
});
const KEYS = {ArrowLeft: () => move(-.25), ArrowRight: () => move(.25), "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": () => view(0, whole), e: nextExposed, n: () => nextUnit(1), p: () => nextUnit(-1), t: theme, "/": () => $("search").focus(), Escape: () => { $("search").value = ""; $("search").dispatchEvent(new Event("input")); chosen = -1; point(null, ""); }};
addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target === $("search")) { if (e.key === "Escape") { KEYS.Escape(); $("search").blur(); } return; }
  if (KEYS[e.key]) { e.preventDefault(); KEYS[e.key](); }
});
$("lanes").addEventListener("dblclick", () => view(0, whole));
$("memory").addEventListener("dblclick", () => view(0, whole));
let wide = width();
new ResizeObserver(() => { if (width() === wide) return; wide = width(); lanes.setSize({width: wide, height: lanes.height}); memory && memory.setSize({width: wide, height: 260}); drawMap(); }).observe($("lanes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
if (data.texts.length) showText(0);
repaint();
document.documentElement.dataset.ready = "yes";
