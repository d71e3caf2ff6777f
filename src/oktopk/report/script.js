"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const root = document.documentElement;

  // Colours: as the system has them, light, dark. Remembered where the browser allows it.
  const button = document.getElementById("theme");
  const modes = ["auto", "light", "dark"];
  const recall = () => { try { return localStorage.getItem("oktopk-theme"); } catch { return null; } };
  const remember = (mode) => { try { localStorage.setItem("oktopk-theme", mode); } catch { /* a page from disk */ } };
  const show = (mode) => {
    if (mode === "auto") delete root.dataset.theme; else root.dataset.theme = mode;
    button.textContent = mode[0].toUpperCase() + mode.slice(1);
    button.setAttribute("aria-label", "Colours: " + (mode === "auto" ? "as the system has them" : mode));
    button.dataset.mode = mode;
  };
  show(modes.includes(recall()) ? recall() : "auto");
  button.addEventListener("click", () => {
    const next = modes[(modes.indexOf(button.dataset.mode) + 1) % modes.length];
    show(next);
    remember(next);
  });

  // Numbers as the page writes them.
  const SCALES = {
    bytes: [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]],
    seconds: [[1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "min"], [3600, "h"]],
    share: [[0.01, "%"]],
    number: [[1, ""]],
  };
  const say = (value, unit) => {
    let [divisor, suffix] = SCALES[unit][0];
    for (const [d, s] of SCALES[unit]) if (Math.abs(value) >= d * (s === "min" || s === "h" ? 2 : 1)) [divisor, suffix] = [d, s];
    const v = value / divisor;
    const text = Number.isInteger(v) || Math.abs(v) >= 1000 ? v.toLocaleString("en", { maximumFractionDigits: 0 })
      : String(Number(v.toPrecision(4)));
    return (text + " " + suffix).trim();
  };

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);
  const place = (x, y) => {
    tip.style.display = "block";
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, x + 16 + width > innerWidth ? x - 16 - width : x + 16) + "px";
    tip.style.top = Math.max(4, Math.min(y - 10, innerHeight - height - 6)) + "px";
  };
  const hide = () => { tip.style.display = "none"; };
  const line = (name, value, color) => {
    const row = document.createElement("div");
    const left = document.createElement("span");
    if (color) {
      const dot = document.createElement("i");
      dot.className = "dot";
      dot.style.background = `var(--${color})`;
      left.append(dot);
    }
    left.append(name);
    const right = document.createElement("span");
    right.textContent = value;
    row.append(left, right);
    return row;
  };

  for (const bar of document.querySelectorAll("[data-tip]")) {
    bar.querySelector("title")?.remove();
    bar.addEventListener("pointermove", (event) => {
      tip.replaceChildren(bar.dataset.tip);
      place(event.clientX, event.clientY);
    });
    bar.addEventListener("pointerleave", hide);
  }

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  for (const figure of document.querySelectorAll("figure")) {
    const script = figure.querySelector("script[type='application/json']");
    if (!script) continue;
    const data = JSON.parse(script.textContent);
    const svg = figure.querySelector("svg");
    const [left, top, right, bottom] = data.box;
    const marks = document.createElementNS(NS, "g");
    svg.append(marks);
    const toX = (v) => left + Math.min(1, Math.max(0, (v - data.x.low) / (data.x.high - data.x.low))) * (right - left);
    const toY = (v) => {
      const f = data.y.log ? Math.log(v / data.y.low) / Math.log(data.y.high / data.y.low) : (v - data.y.low) / (data.y.high - data.y.low);
      return bottom - Math.min(1, Math.max(0, f)) * (bottom - top);
    };
    const element = (name, attributes) => {
      const made = document.createElementNS(NS, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      return made;
    };
    let current = data.x.high;
    const look = (x, clientX, clientY) => {
      const full = data.series.filter((one) => one.x.length);
      if (!full.length) return;
      const longest = full.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      const at = longest.x[nearest(longest.x, x)];
      current = at;
      const rows = [line(data.x.label, say(at, data.x.unit))];
      marks.replaceChildren(element("line", { class: "cursor", x1: toX(at), x2: toX(at), y1: top, y2: bottom }));
      let sum = 0;
      const reach = (data.x.high - data.x.low) / 12;
      for (const one of full) {
        const n = nearest(one.x, at);
        const reference = one.x.length === 2 && one.y[0] === one.y[1];
        if (!reference && Math.abs(one.x[n] - at) > reach) continue;
        rows.push(line(one.name, say(one.y[n], data.y.unit), one.color));
        sum += one.y[n];
        if (!data.stack && !reference && !(data.y.log && one.y[n] <= 0))
          marks.append(element("circle", { class: "spot", cx: toX(one.x[n]), cy: toY(one.y[n]), r: 4, style: `fill:var(--${one.color})` }));
      }
      if (data.stack) rows.push(line("together", say(sum, data.y.unit)));
      tip.replaceChildren(...rows);
      place(clientX, clientY);
    };
    const clear = () => { marks.replaceChildren(); hide(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const inside = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const fraction = (inside - left) / (right - left);
      look(data.x.low + Math.min(1, Math.max(0, fraction)) * (data.x.high - data.x.low), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      const next = Math.min(data.x.high, Math.max(data.x.low, current + way * (data.x.high - data.x.low) / 60));
      look(next, box.left + toX(next) / svg.viewBox.baseVal.width * box.width, box.top + box.height / 3);
    });
  }
})();
