// Curves and clouds: the picture is there; hover or arrow keys tell, click or Enter pins, the search finds a name.
const chart = (root, data) => {
  const place = root.querySelector('.tlhm-draw');
  const series = data.series.map((one, number) => ({
    ...one, number, x: unpack(one.x), y: unpack(one.y), low: one.low && unpack(one.low), high: one.high && unpack(one.high),
  }));
  const points = series.flatMap((one) => Array.from(one.x, (x, i) => ({ one, i, x, y: one.y[i] })));
  const name = (p) => (p.one.labels ? p.one.labels[p.i] : p.one.name);
  const speak = speaker(root);
  const controls = make('div', 'controls');
  place.prepend(controls);
  const pinBox = make('div', 'pinned', place);
  const share = (axis, v) => clamp((v - axis.limits[0]) / (axis.limits[1] - axis.limits[0]), 0, 1);
  let now = 0;
  // One for a wide screen and perhaps another for a phone, of which one is shown.
  const areas = [...place.querySelectorAll('.tlhm-chart-area rect')].map((rect) => {
    const box = over(rect, 'chart');
    box.tabIndex = 0;
    box.setAttribute('role', 'application');
    box.setAttribute('aria-roledescription', 'chart');
    box.setAttribute('aria-label', root.getAttribute('aria-label') + ': arrow keys move, Enter pins, Escape lets go');
    const rings = ['ring', 'ring tlhm-pinring'].map((kind) => make('div', kind, box));
    for (const ring of rings) ring.hidden = true;
    return { box, cursor: rings[0], pin: rings[1] };
  });
  const ring = (which, number) => {
    for (const area of areas) {
      area[which].hidden = number < 0;
      if (number < 0) continue;
      const p = points[number];
      Object.assign(area[which].style, { left: 100 * share(data.x, p.x) + '%', top: 100 - 100 * share(data.y, p.y) + '%' });
    }
  };
  const facts = (p) => {
    const lines = [[data.x.name, show(p.x)], [data.y.name, show(p.y)]];
    if (p.one.low) lines.push(['from', `${show(p.one.low[p.i], 3)} to ${show(p.one.high[p.i], 3)}`]);
    if (p.one.labels && series.length > 1) lines.push(['', p.one.name]);
    return lines;
  };
  const at = (number, aloud) => {
    now = number;
    ring('cursor', number);
    const shown = areas.find((area) => area.box.offsetParent) || areas[0];
    speak.say(name(points[number]), facts(points[number]), shown.cursor.getBoundingClientRect(), aloud);
  };
  const hide = () => (speak.hide(), ring('cursor', -1));
  const pin = (number) => {
    ring('pin', number);
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
    pinBox.replaceChildren();
    ring('pin', -1);
  };
  const nearest = (box, event) => {
    const frame = box.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    let best = -1, least = 30 ** 2;
    points.forEach((p, i) => {
      const d = (share(data.x, p.x) * frame.width - x) ** 2 + ((1 - share(data.y, p.y)) * frame.height - y) ** 2;
      if (d < least) (least = d), (best = i);
    });
    return best;
  };
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
  for (const { box } of areas) {
    box.addEventListener('pointermove', (event) => {
      const found = nearest(box, event);
      found < 0 ? hide() : at(found);
    });
    box.addEventListener('pointerleave', hide);
    box.addEventListener('click', (event) => {
      const found = nearest(box, event);
      if (found >= 0) (at(found), pin(found));
    });
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
  }
  if (!data.lines)
    searchBox(controls, 'find L23H4', (text) => {
      const query = text.toLowerCase();
      const found = query ? points.findIndex((p) => name(p).toLowerCase() === query) : -1;
      if (found >= 0) at(found, true);
      return query ? (found >= 0 ? 'found' : 'nothing found') : '';
    }, () => areas.some((area) => !area.cursor.hidden) && pin(now));
  root.headmap = { series };
};
mount('chart', chart);
