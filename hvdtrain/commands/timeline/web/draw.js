// Drawing. Bars thinner than FINEST share a slot: each kind gets its share of the height.

const canvas = document.getElementById("canvas");
const LANE = 18; // pixels
const OVERVIEW = 34;
const AXIS = 20;
const TOP = OVERVIEW + AXIS;
const FINEST = 1.5; // pixels; thinner bars share one slot

const view = { from: 0, to: data.span || 1, scroll: 0 };
const shown = { lanes, hidden: new Set(), selected: null };
let size = { width: 0, height: 0, gutter: 0 };
let colours = {};
let fills = [];

const scale = () => (size.width - size.gutter) / (view.to - view.from);
const pixelOf = (time) => size.gutter + (time - view.from) * scale();
const timeAt = (pixel) => view.from + (pixel - size.gutter) / scale();

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of ["paper", "ink", "quiet", "line", "ground", "accent", "collective"]) {
    colours[name] = colour(name);
  }
  fills = fillNames.map((name, fill) => {
    if (fill === WAITS) return striped(colour("paper"), colour("negotiate"), 2);
    if (fill === LATE) return striped(colour("late"), colour("paper"), 1);
    if (fill === NEGOTIATE) return striped(colour("negotiate"), colour("negotiate-line"), 1.2);
    return { plain: colour(name.replaceAll(" ", "-")), pattern: null };
  });
}

// A colour with diagonal lines, to be distinguishable in grey; plain in small bars.
function striped(ground, line, width) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  context.fillStyle = ground;
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = line;
  context.lineWidth = width;
  for (const shift of [-8, 0, 8]) {
    context.beginPath();
    context.moveTo(shift - 1, 9);
    context.lineTo(shift + 9, -1);
    context.stroke();
  }
  const plain = ground === colours.paper ? line : ground;
  return { plain, pattern: context.createPattern(tile, "repeat") };
}

function paint(context, fill, x, y, width, height) {
  context.fillStyle = width >= 5 && fills[fill].pattern ? fills[fill].pattern : fills[fill].plain;
  context.fillRect(x, y, width, height);
}

// Draw the pieces of a layer that are in view; return the number of rectangles.
function drawLayer(context, { start, end, fill }, y, height) {
  const factor = scale();
  let count = 0;
  let slot = -1; // left edge of the current slot of thin bars
  const shares = new Float64Array(fillNames.length); // pixels of each kind in that slot
  const flush = () => {
    let bottom = y + height;
    shares.forEach((pixels, kind) => {
      if (!pixels) return;
      const high = Math.min(Math.max(1, (height * pixels) / FINEST), bottom - y);
      bottom -= high;
      paint(context, kind, slot, bottom, FINEST, high);
      count++;
      shares[kind] = 0;
    });
  };
  for (let i = firstAfter(end, view.from); i < start.length && start[i] < view.to; i++) {
    if (shown.hidden.has(fill[i])) continue;
    const left = Math.max(size.gutter, size.gutter + (start[i] - view.from) * factor);
    const right = Math.min(size.width, size.gutter + (end[i] - view.from) * factor);
    if (right - left >= FINEST) {
      paint(context, fill[i], left, y, right - left, height);
      count++;
      continue;
    }
    if (left >= slot + FINEST) {
      flush();
      slot = left;
    }
    shares[fill[i]] += Math.max(right - left, 1e-6);
  }
  flush();
  return count;
}

// Shade the time after the bars that are in this page.
function drawMissing(context) {
  if (data.detail === null || data.detail > view.to) return;
  const x = Math.max(size.gutter, pixelOf(data.detail));
  context.fillStyle = colours.line;
  context.fillRect(x, TOP, size.width - x, size.height - TOP);
  context.fillStyle = colours.ink;
  if (size.width - x > 140) context.fillText("not in this page", x + 8, TOP + LANE / 2);
}

function drawLanes(context) {
  let count = 0;
  context.save();
  context.beginPath();
  context.rect(0, TOP, size.width, size.height - TOP);
  context.clip();
  const first = Math.max(0, Math.floor(view.scroll / LANE));
  const last = Math.min(shown.lanes.length, Math.ceil((view.scroll + size.height - TOP) / LANE));
  for (let i = first; i < last; i++) {
    const lane = shown.lanes[i];
    const y = TOP + i * LANE - view.scroll;
    if (i % 2) {
      context.fillStyle = colours.ground;
      context.globalAlpha = 0.5;
      context.fillRect(0, y, size.width, LANE);
      context.globalAlpha = 1;
    }
    const [behind, front] = lane.layers;
    const thin = lane.rank === null;
    count += drawLayer(context, behind, thin ? y + LANE - 4 : y + 3, thin ? 2 : LANE - 6);
    count += drawLayer(context, front, y + 3, LANE - 6);
    context.fillStyle = lane.rank === null ? colours.ink : colours.accent;
    context.fillText(fitted(context, lane.name), 4, y + LANE / 2);
  }
  drawMissing(context);
  drawSelected(context);
  context.restore();
  return count;
}

function drawSelected(context) {
  if (!shown.selected) return;
  const { lane, start, end } = shown.selected;
  const i = shown.lanes.indexOf(lane);
  if (i < 0 || end < view.from || start > view.to) return;
  const left = Math.max(size.gutter, pixelOf(start)) - 1.5;
  const width = Math.max(3, Math.min(size.width, pixelOf(end)) - left + 1.5);
  context.strokeStyle = colours.ink;
  context.lineWidth = 2;
  context.strokeRect(left, TOP + i * LANE - view.scroll + 1, width, LANE - 2);
}

// Shorten a name to fit into the gutter, keeping most of its end, which distinguishes names.
function fitted(context, name) {
  const room = size.gutter - 8;
  if (context.measureText(name).width <= room) return name;
  let keep = Math.floor((name.length * room) / context.measureText(name).width) - 1;
  for (; keep > 2; keep--) {
    const text = `${name.slice(0, keep >> 2)}…${name.slice((keep >> 2) - keep)}`;
    if (context.measureText(text).width <= room) return text;
  }
  return "…";
}

// Draw ticks at round times, as close as their labels allow.
function drawAxis(context) {
  const zero = data.begin + view.from;
  const span = view.to - view.from;
  const label = (time, step) => {
    const [factor, unit] = step < 1000 ? [1e3, "ms"] : [1e6, "s"];
    const digits = Math.max(0, Math.ceil(Math.log10(factor / step) - 1e-9));
    return `${(time / factor).toFixed(digits)} ${unit}`;
  };
  const wide = (step) => context.measureText(label(data.begin + view.to, step)).width + 10;
  let power = 10 ** Math.floor(Math.log10(span) - 2);
  let step = power;
  for (let i = 1; step * scale() < wide(step) && step < span; i++) {
    if (i % 3 === 0) power *= 10;
    step = power * [1, 2, 5][i % 3];
  }
  let free = size.gutter;
  let count = 0;
  context.fillStyle = colours.quiet;
  for (let time = Math.ceil(zero / step) * step; time < data.begin + view.to; time += step) {
    const x = pixelOf(time - data.begin);
    context.fillRect(x, OVERVIEW, 1, 5);
    const text = label(time, step);
    const { width } = context.measureText(text);
    const left = Math.min(Math.max(x - width / 2, free), size.width - width - 2);
    if (left < free || Math.abs(left - x + width / 2) > width / 2) continue;
    context.fillText(text, left, OVERVIEW + AXIS / 2 + 3);
    free = left + width + 6;
    count++;
  }
  canvas.dataset.ticks = count;
}

function drawSteps(context) {
  const { start } = data.steps;
  const [first, last] = [firstAfter(start, view.from - 1), firstAfter(start, view.to)];
  if (last - first > size.width / 12) return; // the lines would fill the view
  context.fillStyle = colours.line;
  for (const time of start.slice(first, last)) {
    context.fillRect(pixelOf(time), TOP, 1, size.height - TOP);
  }
}

// Draw the states over the whole file, and a frame around the part in view.
function drawOverview(context) {
  const { width, rows } = data.history;
  const room = size.width - size.gutter;
  const x = (time) => size.gutter + (time / (data.span || 1)) * room;
  context.fillStyle = colours.ground;
  context.fillRect(size.gutter, 0, room, OVERVIEW - 2);
  for (let pixel = 0; pixel < room; pixel++) {
    const first = Math.floor(((pixel / room) * data.span) / width);
    const last = Math.max(first + 1, Math.ceil((((pixel + 1) / room) * data.span) / width));
    let [waiting, communicating] = [0, 0];
    for (let i = first; i < Math.min(last, rows[0].length); i++) {
      waiting += rows[1][i] / (width * (last - first));
      communicating += rows[2][i] / (width * (last - first));
    }
    const low = (OVERVIEW - 2) * communicating;
    const high = (OVERVIEW - 2) * waiting;
    context.fillStyle = colours.collective;
    context.fillRect(size.gutter + pixel, OVERVIEW - 2 - low, 1, low);
    context.fillStyle = fills[NEGOTIATE].plain;
    context.fillRect(size.gutter + pixel, OVERVIEW - 2 - low - high, 1, high);
  }
  const [left, right] = [x(view.from), Math.max(x(view.to), x(view.from) + 3)];
  context.fillStyle = colours.ink;
  context.globalAlpha = 0.25;
  context.fillRect(size.gutter, 0, left - size.gutter, OVERVIEW - 2);
  context.fillRect(right, 0, size.width - right, OVERVIEW - 2);
  context.globalAlpha = 1;
  context.fillRect(left - 1, 0, 1, OVERVIEW);
  context.fillRect(right, 0, 1, OVERVIEW);
  context.fillStyle = colours.quiet;
  context.fillText("whole file", 4, OVERVIEW / 2 - 1);
}

function draw() {
  const began = performance.now();
  const ratio = window.devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  size = { width: canvas.clientWidth, height: canvas.clientHeight };
  size.gutter = Math.round(Math.min(230, Math.max(84, box.width * 0.2)));
  if (canvas.width !== Math.round(size.width * ratio)) canvas.width = Math.round(size.width * ratio);
  if (canvas.height !== Math.round(size.height * ratio)) {
    canvas.height = Math.round(size.height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, size.width, size.height);
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = "middle";
  drawOverview(context);
  drawSteps(context);
  drawAxis(context);
  canvas.dataset.rectangles = drawLanes(context);
  canvas.dataset.from = view.from;
  canvas.dataset.to = view.to;
  canvas.dataset.lanes = shown.lanes.length;
  canvas.dataset.milliseconds = (performance.now() - began).toFixed(1);
}
