// User input: zoom, move, point, search, filter.

const details = document.getElementById("details");
const note = document.getElementById("note");
const search = document.getElementById("search");
const SHORTEST = 5; // minimum number of microseconds in view
const end = data.detail === null ? data.span : data.detail;
let waiting = false;

// Schedule a drawing, one for all changes until the next frame.
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

function show(from, to) {
  const length = Math.min(Math.max(to - from, SHORTEST), data.span || 1);
  view.from = Math.min(Math.max(from, 0), Math.max(0, (data.span || 1) - length));
  view.to = view.from + length;
  redraw();
}

function zoom(factor, pixel = (size.width + size.gutter) / 2) {
  const middle = timeAt(Math.max(pixel, size.gutter));
  show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}

const move = (share) => {
  const by = share * (view.to - view.from);
  show(view.from + by, view.to + by);
};

function scroll(pixels) {
  const limit = Math.max(0, shown.lanes.length * LANE - (size.height - TOP));
  view.scroll = Math.min(Math.max(view.scroll + pixels, 0), limit);
  redraw();
}

// The piece under a point of the canvas: { lane, bar, fill, start, end }, or null.
function pieceAt(x, y) {
  const lane = shown.lanes[Math.floor((y - TOP + view.scroll) / LANE)];
  if (!lane || y < TOP || x < size.gutter) return null;
  const reach = 3 / scale(); // thin bars have a margin for the pointer
  const time = timeAt(x);
  for (const { start, end: ends, fill, bar } of [...lane.layers].reverse()) {
    let best = -1;
    for (let i = firstAfter(ends, time - reach); i < start.length; i++) {
      if (start[i] > time + reach) break;
      if (shown.hidden.has(fill[i])) continue;
      if (best < 0 || ends[i] - start[i] > ends[best] - start[best]) best = i;
      if (start[i] <= time && time <= ends[i]) {
        best = i;
        break;
      }
    }
    if (best >= 0) {
      return { lane, bar: bar[best], fill: fill[best], start: start[best], end: ends[best] };
    }
  }
  return null;
}

function point(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function showDetails(piece) {
  if (piece) details.textContent = describe(piece.lane, piece.bar, piece.fill);
}

// Pointers: one moves the view, two zoom, a still one is a tap; in the overview it sets the time.
const pointers = new Map();
let moved = 0;

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, point(event));
  if (pointers.size === 1) moved = 0;
});

canvas.addEventListener("pointermove", (event) => {
  const [x, y] = point(event);
  const before = pointers.get(event.pointerId);
  if (!before) {
    showDetails(pieceAt(x, y));
    return;
  }
  moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
  if (pointers.size === 2) {
    const second = [...pointers].find(([id]) => id !== event.pointerId)[1];
    const distance = (a, b) => Math.max(20, Math.hypot(a[0] - b[0], a[1] - b[1]));
    zoom(distance(before, second) / distance([x, y], second), (x + second[0]) / 2);
  } else if (before[1] < OVERVIEW) {
    goTo(x);
  } else if (moved > 5) {
    move((before[0] - x) / (size.width - size.gutter));
    scroll(before[1] - y);
  }
  pointers.set(event.pointerId, [x, y]);
});

canvas.addEventListener("pointerup", (event) => {
  const [x, y] = point(event);
  if (moved <= 5 && pointers.size === 1) {
    if (y < OVERVIEW) goTo(x);
    else {
      shown.selected = pieceAt(x, y);
      showDetails(shown.selected);
      redraw();
    }
  }
  pointers.delete(event.pointerId);
});

canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));

function goTo(x) {
  const middle = ((x - size.gutter) / (size.width - size.gutter)) * data.span;
  const half = (view.to - view.from) / 2;
  show(middle - half, middle + half);
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    move((event.deltaX || event.deltaY) / 800);
  } else {
    zoom(Math.exp(event.deltaY / 400), point(event)[0]);
  }
}, { passive: false });

const keys = {
  ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
  ArrowUp: () => scroll(-LANE), ArrowDown: () => scroll(LANE),
  PageUp: () => scroll(-size.height / 2), PageDown: () => scroll(size.height / 2),
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
  0: () => show(0, data.span), Home: () => show(0, data.span),
};
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

// Show the step at this index of the table of steps, with a small margin.
function showStep(index) {
  const { start } = data.steps;
  if (!start.length) return;
  const i = Math.min(Math.max(index, 0), start.length - 1);
  const stop = i + 1 < start.length ? start[i + 1] : end;
  const margin = 0.03 * (stop - start[i]);
  show(start[i] - margin, stop + margin);
}

const stepInView = () => firstAfter(data.steps.start, (view.from + view.to) / 2) - 1;
const buttons = {
  in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, data.span),
  previous: () => showStep(stepInView() - 1), next: () => showStep(stepInView() + 1),
};
for (const [name, action] of Object.entries(buttons)) {
  document.getElementById(name).addEventListener("click", action);
}
for (const button of document.querySelectorAll("button.step")) {
  button.addEventListener("click", () => {
    const index = data.steps.number.indexOf(Number(button.dataset.step));
    if (index >= 0) showStep(index);
    else note.textContent = `Step ${button.dataset.step} is after the bars in this page.`;
    document.getElementById("view").scrollIntoView();
  });
}

search.addEventListener("input", () => {
  const words = search.value.toLowerCase();
  shown.lanes = lanes.filter((l) => l.rank !== null || l.name.toLowerCase().includes(words));
  const count = shown.lanes.filter((lane) => lane.rank === null).length;
  note.textContent = words ? `${count} of ${data.rows.length} tensors` : "";
  view.scroll = 0;
  redraw();
});

function createFilter() {
  const used = new Set(lanes.flatMap((lane) => lane.layers.flatMap((l) => [...new Set(l.fill)])));
  fillNames.forEach((name, fill) => {
    if (!used.has(fill)) return;
    const [label, box, swatch] = ["label", "input", "canvas"].map((t) => document.createElement(t));
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) shown.hidden.delete(fill);
      else shown.hidden.add(fill);
      redraw();
    });
    swatch.width = 22;
    swatch.height = 14;
    swatch.dataset.fill = fill;
    label.append(box, swatch, name);
    document.getElementById("filter").append(label);
  });
}

function recolour() {
  readColours();
  for (const swatch of document.querySelectorAll("#filter canvas")) {
    paint(swatch.getContext("2d"), Number(swatch.dataset.fill), 0, 0, 22, 14);
  }
  redraw();
}

createFilter();
recolour();
if (data.detail !== null) {
  note.textContent = `Bars up to ${((data.begin + data.detail) / 1e6).toFixed(2)} s are in this page; `
    + "use hvdtrain timeline --slice FROM:TO --html for another part.";
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
new ResizeObserver(redraw).observe(canvas);
showStep(Math.min(1, data.steps.start.length - 1));
