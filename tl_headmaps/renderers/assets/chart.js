// Curves with bands, and clouds of points: hover or arrow keys tell, click or Enter pins, the search finds a name.
const chart = (root, data) => {
  const place = root.querySelector('.tlhm-draw');
  const series = data.series.map((one, number) => ({
    ...one, number, x: unpack(one.x), y: unpack(one.y), low: one.low && unpack(one.low), high: one.high && unpack(one.high),
  }));
  const points = series.flatMap((one) => Array.from(one.x, (x, i) => ({ one, i, x, y: one.y[i] })));
  const name = (p) => (p.one.labels ? p.one.labels[p.i] : p.one.name);
  const speak = speaker(root);
  const controls = make('div', 'controls', place);
  const box = make('div', 'chart', place);
  const pinBox = make('div', 'pinned', place);
  const keyBox = make('div', 'keys', place);
  box.tabIndex = 0;
  box.setAttribute('role', 'application');
  box.setAttribute('aria-roledescription', 'chart');
  box.setAttribute('aria-label', root.getAttribute('aria-label') + ': arrow keys move, Enter pins, Escape lets go');
  let now = 0, pinned = -1, toX, toY;
  const draw = (tag, attributes, parent, text) => {
    const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const ticks = ([low, high], count, least = 0) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max([1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw, least);
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Number(v.toPrecision(12)));
    return found;
  };
  const redraw = () => {
    const W = Math.min(box.clientWidth, 760), H = Math.round(clamp(W * 0.56, 220, 400));
    const edge = { left: 58, right: 14, top: 10, bottom: 44 };
    const [x0, x1] = data.x.limits, [y0, y1] = data.y.limits;
    toX = (v) => edge.left + ((v - x0) / (x1 - x0)) * (W - edge.left - edge.right);
    toY = (v) => H - edge.bottom - ((v - y0) / (y1 - y0)) * (H - edge.top - edge.bottom);
    box.replaceChildren();
    const svg = draw('svg', { width: W, height: H, 'aria-hidden': 'true' }, box);
    for (const v of ticks(data.x.limits, Math.max(3, W / 90), data.x.counts ? 1 : 0)) {
      draw('line', { x1: toX(v), x2: toX(v), y1: H - edge.bottom, y2: H - edge.bottom + 4, class: 'tlhm-axis' }, svg);
      draw('text', { x: toX(v), y: H - edge.bottom + 17, 'text-anchor': 'middle' }, svg, show(v));
    }
    for (const v of ticks(data.y.limits, Math.max(3, H / 60))) {
      draw('line', { x1: edge.left, x2: W - edge.right, y1: toY(v), y2: toY(v), class: 'tlhm-rule' }, svg);
      draw('text', { x: edge.left - 7, y: toY(v) + 4, 'text-anchor': 'end' }, svg, show(v));
    }
    draw('line', { x1: edge.left, x2: W - edge.right, y1: H - edge.bottom, y2: H - edge.bottom, class: 'tlhm-axis' }, svg);
    draw('text', { x: (edge.left + W - edge.right) / 2, y: H - 8, 'text-anchor': 'middle', class: 'tlhm-an' }, svg, data.x.name);
    draw('text', { transform: `translate(14 ${(H - edge.bottom + edge.top) / 2}) rotate(-90)`, 'text-anchor': 'middle', class: 'tlhm-an' }, svg, data.y.name);
    if (data.diagonal) {
      const low = Math.max(x0, y0), high = Math.min(x1, y1);
      draw('line', { x1: toX(low), y1: toY(low), x2: toX(high), y2: toY(high), class: 'tlhm-dash' }, svg);
    }
    for (const one of series) {
      const group = draw('g', { class: 'tlhm-s' + (one.number % 6) }, svg);
      const path = (values) => Array.from(one.x, (x, i) => `${toX(x).toFixed(1)},${toY(values[i]).toFixed(1)}`);
      if (one.low) draw('polygon', { points: [...path(one.low), ...path(one.high).reverse()].join(' '), class: 'tlhm-band' }, group);
      if (data.lines) draw('polyline', { points: path(one.y).join(' '), class: 'tlhm-line', 'stroke-dasharray': one.number ? '6 3' : 'none' }, group);
      for (let i = 0; i < one.x.length; i++) draw('circle', { cx: toX(one.x[i]), cy: toY(one.y[i]), r: data.lines ? 3 : 3.5 }, group);
    }
    box.cursor = draw('circle', { r: 7, class: 'tlhm-ring', visibility: 'hidden' }, svg);
    box.pin = draw('circle', { r: 8, class: 'tlhm-ring tlhm-pinring', visibility: 'hidden' }, svg);
    if (pinned >= 0) ring(box.pin, points[pinned]);
  };
  const ring = (node, p) => {
    node.setAttribute('cx', toX(p.x));
    node.setAttribute('cy', toY(p.y));
    node.setAttribute('visibility', 'visible');
  };
  const facts = (p) => {
    const lines = [[data.x.name, show(p.x)], [data.y.name, show(p.y)]];
    if (p.one.low) lines.push(['from', `${show(p.one.low[p.i], 3)} to ${show(p.one.high[p.i], 3)}`]);
    if (p.one.labels && series.length > 1) lines.push(['', p.one.name]);
    return lines;
  };
  const at = (number, aloud) => {
    now = number;
    const p = points[number], frame = box.querySelector('svg').getBoundingClientRect();
    ring(box.cursor, p);
    const left = frame.left + toX(p.x) - 6, top = frame.top + toY(p.y) - 6;
    speak.say(name(p), facts(p), { left, top, width: 12, bottom: top + 12 }, aloud);
  };
  const hide = () => (speak.hide(), box.cursor.setAttribute('visibility', 'hidden'));
  const pin = (number) => {
    pinned = number;
    ring(box.pin, points[number]);
    pinBox.replaceChildren();
    const head = make('div', 'lt', pinBox);
    head.append(make('bdi', '', null, name(points[number])));
    make('button', '', head, 'unpin').addEventListener('click', unpin);
    const table = make('table', '', pinBox);
    for (const p of points[number].one.labels ? points.filter((other) => name(other) === name(points[number])).slice(0, 20) : [points[number]]) {
      const row = make('tr', '', table);
      for (const [key, text] of facts(p)) make('td', '', row, (key ? key + ' ' : '') + text);
    }
    lists(pinBox, data.drill && data.drill[name(points[number])]);
  };
  const unpin = () => {
    pinned = -1;
    pinBox.replaceChildren();
    box.pin.setAttribute('visibility', 'hidden');
  };
  const nearest = (event) => {
    const frame = box.querySelector('svg').getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    let best = -1, least = 30 ** 2;
    points.forEach((p, i) => {
      const d = (toX(p.x) - x) ** 2 + (toY(p.y) - y) ** 2;
      if (d < least) (least = d), (best = i);
    });
    return best;
  };
  box.addEventListener('pointermove', (event) => {
    const found = nearest(event);
    found < 0 ? hide() : at(found);
  });
  box.addEventListener('pointerleave', hide);
  box.addEventListener('click', (event) => {
    const found = nearest(event);
    if (found >= 0) (at(found), pin(found));
  });
  // Left and right follow the series by x; up and down change the series (curves) or move by y (clouds).
  const steps = (key) => points.map((_, i) => i).sort((a, b) => points[a][key] - points[b][key] || a - b);
  const byX = data.lines ? null : steps('x'), byY = data.lines ? null : steps('y');
  const along = (order, step) => order[clamp(order.indexOf(now) + step, 0, order.length - 1)];
  const neighbour = (key) => {
    const sign = key === 'ArrowRight' || key === 'ArrowUp' ? 1 : -1, sideways = key === 'ArrowLeft' || key === 'ArrowRight';
    if (!data.lines) return along(sideways ? byX : byY, sign);
    const { one, i } = points[now];
    const next = sideways ? one : series[clamp(one.number - sign, 0, series.length - 1)];
    const index = clamp(sideways ? i + sign : i, 0, next.x.length - 1);
    return points.findIndex((p) => p.one === next && p.i === index);
  };
  box.addEventListener('focus', () => box.matches(':focus-visible') && points.length && at(now, true));
  box.addEventListener('blur', hide);
  box.addEventListener('keydown', (event) => {
    if (!points.length) return;
    if (event.key.startsWith('Arrow')) at(neighbour(event.key), true);
    else if (event.key === 'Enter' || event.key === ' ') pin(now);
    else if (event.key === 'Escape') (unpin(), hide());
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  if (!data.lines)
    searchBox(controls, 'find L23H4', (text) => {
      const query = text.toLowerCase();
      const found = query ? points.findIndex((p) => name(p).toLowerCase() === query) : -1;
      if (found >= 0) at(found, true);
      return query ? (found >= 0 ? 'found' : 'nothing found') : '';
    }, () => box.cursor.getAttribute('visibility') === 'visible' && pin(now));
  if (series.length > 1)
    for (const one of series) make('span', 'key tlhm-s' + (one.number % 6), keyBox, one.name);
  new ResizeObserver(redraw).observe(box);
  redraw();
  root.headmap = { series };
};
mount('chart', chart);
