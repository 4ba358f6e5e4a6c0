// Draws the charts, keeps an open page up to date, and answers keys. Pages work without it.
"use strict";

const COLOURS = {
  light: ["#1d4f91", "#c2410c", "#4d7c0f", "#7b3fa0", "#0e7490", "#8a6d00", "#9d174d", "#57606a"],
  dark: ["#8ab4f0", "#f0a070", "#a5d06a", "#cf9ff0", "#6fd0e0", "#e0c04a", "#f08ab8", "#a3adb9"],
};
const LIVE_EVERY = 2000; // milliseconds between looks at the run's version
const REFRESH_AFTER = 5000; // a page is fetched again at most so often
const dark = matchMedia("(prefers-color-scheme: dark)");

function draw(plot) {
  const chart = JSON.parse(plot.dataset.chart);
  const colours = COLOURS[dark.matches ? "dark" : "light"];
  const ink = getComputedStyle(document.body).getPropertyValue("--faint");
  const rule = getComputedStyle(document.body).getPropertyValue("--rule");
  const data = [chart.x];
  const series = [{ label: chart.unit }];
  const bands = [];
  chart.series.forEach((s, i) => {
    const colour = colours[i % colours.length];
    data.push(s.values);
    series.push({
      label: s.name, stroke: colour, width: 2, spanGaps: true,
      points: { show: chart.x.length < 60, size: 5, fill: colour },
      value: (_, v) => (v === null ? "–" : v.toFixed(3)),
    });
    if (s.low) {
      data.push(s.high, s.low);
      const edge = { stroke: "transparent", points: { show: false }, class: "edge" };
      series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
      bands.push({ series: [series.length - 2, series.length - 1], fill: colour + "26" });
    }
  });
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule }, font: "12px system-ui" };
  const drawn = new uPlot({
    width: plot.clientWidth, height: 210, series, bands,
    scales: { x: { time: false } },
    axes: [{ ...axis, grid: { show: false } }, { ...axis, size: 46 }],
    cursor: { y: false },
    legend: { live: true },
  }, data, plot);
  if (chart.href) {
    drawn.over.addEventListener("click", () => {
      const i = drawn.cursor.idx;
      if (i !== null && i !== undefined) location.href = chart.href.replace("{x}", chart.x[i]);
    });
  }
  plot.drawn = drawn;
}

function drawAll() {
  for (const plot of document.querySelectorAll("[data-chart]")) {
    if (plot.drawn) plot.drawn.destroy();
    plot.drawn = null;
    if (plot.clientWidth) draw(plot);
  }
}

// An open page: when the run has written, fetch the page again and put its content in place.
let refreshed = Date.now();

async function look() {
  const main = document.querySelector("main[data-live]");
  if (!main) return;
  try {
    const answer = await fetch(main.dataset.live, { cache: "no-store" });
    const { version } = await answer.json();
    const due = Date.now() - refreshed > REFRESH_AFTER;
    if (String(version) !== main.dataset.version && due && !document.hidden) await refresh();
  } catch {
    // The server is gone for a moment: the page stays as it is, and looks again.
  }
  setTimeout(look, LIVE_EVERY);
}

async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  refreshed = Date.now();
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const old = document.querySelector("main");
  if (old.contains(document.activeElement) && document.activeElement !== old) return; // being used
  const open = new Set([...old.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
  const place = scrollY;
  old.replaceWith(document.adoptNode(fresh.querySelector("main")));
  for (const summary of document.querySelectorAll("main details > summary")) {
    if (open.has(summary.textContent)) summary.parentElement.open = true;
  }
  const state = fresh.querySelector(".state");
  if (state) document.querySelector(".state")?.replaceWith(document.adoptNode(state));
  drawAll();
  scrollTo(0, place);
}

// Keys: rows of the page's tables, neighbours, up, home.
function step(by) {
  const rows = [...document.querySelectorAll("table.rows tbody tr")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.classList.contains("here"));
  const next = rows[Math.min(rows.length - 1, Math.max(0, now + by))];
  rows[now]?.classList.remove("here");
  next.classList.add("here");
  next.querySelector("a")?.focus();
  next.scrollIntoView({ block: "nearest" });
}

const follow = (selector) => document.querySelector(selector)?.click();
const KEYS = {
  j: () => step(1), k: () => step(-1), u: () => follow("a[rel=up]"), h: () => follow("a.home"),
  "[": () => follow("a[rel=prev]"), "]": () => follow("a[rel=next]"),
};

addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  KEYS[event.key]?.();
});
dark.addEventListener("change", drawAll);
addEventListener("resize", () => { clearTimeout(drawAll.later); drawAll.later = setTimeout(drawAll, 150); });
drawAll();
setTimeout(look, LIVE_EVERY);
