"use strict";
// The data of the page as lanes of bars. Times are microseconds since the first displayed event.

const data = JSON.parse(document.getElementById("data").textContent);
const WAITS = data.kinds.length; // fills: one per kind of phase, and two for the ranks
const LATE = WAITS + 1;
const fillNames = [...data.kinds, "rank waits for others", "rank is late"];
const OPERATION = data.kinds.indexOf("operation");
const NEGOTIATE = data.kinds.indexOf("negotiate");

const kindOf = (bar) => data.phases[data.bars.phase[bar]][1];
const startOf = (bar) => data.bars.start[bar];
const endOf = (bar) => data.bars.start[bar] + data.bars.length[bar];
const lateBars = new Set(data.late);
const lanes = [...rankLanes(), ...tensorLanes()];

// The index of the first of the ascending values that is greater than the value.
function firstAfter(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Non-overlapping pieces [start, end, fill, bar] as columns, sorted by time.
function layer(pieces) {
  pieces.sort((a, b) => a[0] - b[0]);
  const column = (i) => Float64Array.from(pieces, (piece) => piece[i]);
  return { start: column(0), end: column(1), fill: column(2), bar: column(3) };
}

// One lane per tensor: behind, thin, whole operations; in front their parts. Tensors that recur in
// every step come first.
function tensorLanes() {
  const behind = data.rows.map(() => []);
  const front = data.rows.map(() => []);
  data.bars.row.forEach((row, bar) => {
    const kind = kindOf(bar);
    (kind === OPERATION ? behind : front)[row].push([startOf(bar), endOf(bar), kind, bar]);
  });
  const times = (row) => front[row].filter((piece) => piece[2] === NEGOTIATE).length;
  const order = data.rows.map((_, row) => row).sort((a, b) => (times(b) > 1) - (times(a) > 1));
  return order.map((row) => ({
    name: data.rows[row], rank: null, layers: [layer(behind[row]), layer(front[row])],
  }));
}

// The ticks of a negotiation: [rank, time], sorted by time.
function ticksOf(bar) {
  const { bar: bars, rank, time } = data.ticks;
  const ticks = [];
  for (let i = firstAfter(bars, bar - 1); i < bars.length && bars[i] === bar; i++) {
    ticks.push([rank[i], time[i]]);
  }
  return ticks;
}

// One lane per rank: behind its waits, from its tick to the last one; in front its lateness.
function rankLanes() {
  const waits = new Map();
  const late = new Map();
  for (let i = 0; i < data.ticks.bar.length;) {
    const bar = data.ticks.bar[i];
    const ticks = ticksOf(bar);
    const [lastRank, last] = ticks[ticks.length - 1];
    for (const [rank, time] of ticks) {
      if (!waits.has(rank)) waits.set(rank, []);
      if (time < last) waits.get(rank).push([time, last, WAITS, bar]);
    }
    if (lateBars.has(bar)) {
      if (!late.has(lastRank)) late.set(lastRank, []);
      late.get(lastRank).push([ticks[ticks.length - 2][1], last, LATE, bar]);
    }
    i += ticks.length;
  }
  return [...waits.keys()].sort((a, b) => a - b).map((rank) => ({
    name: `rank ${rank}`, rank,
    layers: [layer(joined(waits.get(rank))), layer(joined(late.get(rank) || []))],
  }));
}

// Merge overlapping pieces.
function joined(pieces) {
  pieces.sort((a, b) => a[0] - b[0]);
  const result = [];
  for (const piece of pieces) {
    const before = result[result.length - 1];
    if (before && piece[0] <= before[1]) before[1] = Math.max(before[1], piece[1]);
    else result.push([...piece]);
  }
  return result;
}

function duration(micros) {
  for (const [factor, unit] of [[1e6, "s"], [1e3, "ms"]]) {
    if (Math.abs(micros) >= 0.9995 * factor) {
      const value = micros / factor;
      return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  return `${micros.toFixed(0)} µs`;
}

// Describe a bar in words.
function describe(lane, bar, fill) {
  const at = `${((data.begin + startOf(bar)) / 1e6).toFixed(6)} s`;
  const lines = [data.rows[data.bars.row[bar]]];
  if (lane.rank !== null) {
    lines.unshift(`Rank ${lane.rank} ${fill === LATE ? "is late with" : "waits for others with"}`);
  }
  const [name, kind] = data.phases[data.bars.phase[bar]];
  lines.push(`${name} (${data.kinds[kind]}), ${duration(data.bars.length[bar])} from ${at}`);
  const ticks = kind === NEGOTIATE ? ticksOf(bar) : [];
  if (ticks.length) {
    const first = ticks[0][1];
    const shown = ticks.length > 16 ? [...ticks.slice(0, 8), null, ...ticks.slice(-7)] : ticks;
    const words = shown.map((t) => (t ? `rank ${t[0]} +${duration(t[1] - first)}` : "..."));
    lines.push(`ready: ${words.join(", ")}`);
    if (lateBars.has(bar)) {
      const [[, earlier], [rank, later]] = ticks.slice(-2);
      lines.push(`rank ${rank} was late by ${duration(later - earlier)}`);
    }
  }
  return lines.join("\n");
}
