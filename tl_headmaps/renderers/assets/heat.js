// Heat maps: the picture is there; this adds what moves: tooltips, pins, search, keyboard and the choice of a map.
const heat = (root, data) => {
  const { rows, cols, scales, lengths } = data;
  const place = root.querySelector('.tlhm-draw');
  const maps = data.maps.map((map, i) => ({
    ...map,
    values: unpack(map.values),
    null: map.null && unpack(map.null),
    interval: map.interval && map.interval.map(unpack),
    details: (map.details || []).map(([name, values]) => [name, unpack(values)]),
    marked: new Set(map.marked),
    scale: scales[map.scale],
    drawing: place.querySelector(`[data-key=map${i}]`),
  }));
  const exists = (r, c) => r >= 0 && r < rows.n && c >= 0 && c < (lengths ? lengths[r] : cols.n);
  const tick = (axis, i) => (axis.labels ? axis.labels[i] : String(i));
  const called = (r, c) =>
    data.item === 'head' ? `L${r}H${c}`
      : data.item === 'pair' ? `${tick(rows, r)} → ${tick(cols, c)}` : `${rows.name} ${tick(rows, r)}, ${tick(cols, c)}`;
  const ranked = (map) => (map.ranked ||= Float32Array.from(map.values).filter((v) => v === v).sort());
  const facts = (map, r, c, brief) => {
    const i = r * cols.n + c, value = map.values[i];
    const { names } = map.scale;
    const lines = [[brief ? '' : map.scale.unit, names && value === value ? names[value] : show(value)]];
    if (value !== value) return lines;
    if (data.item !== 'pair' && !names) {
      const above = ranked(map).length - ranked(map).findLastIndex((other) => other <= value);
      lines.push(['rank', `${above} of ${ranked(map).length}`]);
    }
    if (map.null) lines.push(['null', show(map.null[i], 3)]);
    if (map.interval) lines.push(['95%', map.interval.map((bound) => show(bound[i], 3)).join(' to ')]);
    if (map.marked.has(i)) lines.push(['note', data.mark]);
    for (const [name, values] of map.details) {
      // Probabilities may be smaller than a 32-bit float can say.
      const tiny = /^[pq]( |$)/.test(name) && values[i] < 1e-9;
      lines.push([name, tiny ? '< 1e-9' : show(values[i])]);
    }
    return lines;
  };

  // What is shown, where the cursor is, what is pinned, what the search found.
  const groups = [...new Set(maps.map((map) => map.group || ''))];
  const names = [...new Set(maps.map((map) => map.name))];
  const filled = (r) => !lengths || lengths[r] > 0;
  const start = Array.from({ length: rows.n }, (_, r) => r).find(filled) || 0;
  const now = { group: groups[0], name: names[0], r: start, c: 0, pinned: data.pinned || null, hits: [], hit: -1 };
  const speak = speaker(root);
  const controls = make('div', 'controls');
  place.prepend(controls);
  const aside = make('div', 'aside', place.querySelector('.tlhm-sides'));
  const pinBox = make('div', 'pinned', aside);
  const topBox = make('div', 'tops', aside);
  const needles = [...place.querySelectorAll('[data-key=bar]')].map((bar) => make('div', 'needle', over(bar, 'strip')));

  const choose = (title, options, key) => {
    if (options.length < 2) return;
    const select = make('select', '', make('label', '', controls, title + ' '));
    select.setAttribute('aria-label', title);
    for (const option of options) make('option', '', select, option).value = option;
    select.addEventListener('change', () => ((now[key] = select.value), choice()));
  };
  if (!data.panels) choose(data.switches[0], names, 'name');
  choose(data.switches[1], groups, 'group');

  const found = (text) => {
    const query = text.toLowerCase(), head = /^l(\d+)h(\d+)$/.exec(query);
    const has = (label) => label.toLowerCase().includes(query);
    const told = (lists) => lists && lists.some((list) => list.rows.some((cells) => cells.some(has)));
    now.hits = [];
    now.hit = -1;
    if (query && head && data.item === 'head') {
      if (exists(+head[1], +head[2])) now.hits.push([+head[1], +head[2]]);
    } else if (query) {
      for (let r = 0; r < rows.n; r++)
        for (let c = 0; c < cols.n; c++) {
          const labelled = (rows.labels && has(rows.labels[r])) || (cols.labels && has(cols.labels[c]));
          if (exists(r, c) && (labelled || told(data.drill && data.drill[called(r, c)]))) now.hits.push([r, c]);
        }
    }
    mark();
    if (now.hits.length) move(...now.hits[0]);
    return query ? (now.hits.length ? `${now.hits.length} found` : 'nothing found') : '';
  };
  const nextHit = () => {
    if (!now.hits.length) return;
    now.hit = (now.hit + 1) % now.hits.length;
    move(...now.hits[now.hit]);
    pin(...now.hits[now.hit]);
  };
  if (rows.n * cols.n > 1 && !data.numbers)
    searchBox(controls, data.item !== 'head' ? 'find a label' : data.drill ? 'find L23H4 or a token' : 'find L23H4', found, nextHit);

  // Where a row is drawn: the first at the top, or at the bottom. And the same back.
  const flip = (r) => (data.lower ? rows.n - 1 - r : r);
  const boxAt = (plot, r, c, name) => {
    const box = make('div', name, plot.marks);
    Object.assign(box.style, {
      left: (100 * c) / cols.n + '%', top: (100 * flip(r)) / rows.n + '%', width: 100 / cols.n + '%', height: 100 / rows.n + '%',
    });
    return box;
  };
  const mark = () => {
    for (const plot of plots) {
      plot.marks.replaceChildren();
      for (const [r, c] of now.hits.slice(0, 300)) boxAt(plot, r, c, 'hit');
      if (now.pinned) boxAt(plot, ...now.pinned, 'pin');
      plot.cursor = boxAt(plot, now.r, now.c, 'cursor');
    }
  };
  const at = (plot, r, c, aloud) => {
    now.r = r;
    now.c = c;
    for (const other of plots)
      Object.assign(other.cursor.style, { left: (100 * c) / cols.n + '%', top: (100 * flip(r)) / rows.n + '%' });
    const title = called(r, c) + (plot.map.name && maps.length > 1 ? ' · ' + plot.map.name : '');
    speak.say(title, facts(plot.map, r, c), plot.cursor.getBoundingClientRect(), aloud);
    plot.box.setAttribute('aria-valuetext', title);
    const value = plot.map.values[r * cols.n + c];
    for (const needle of needles) {
      needle.style.setProperty('--at', position(plot.map.scale, value) * 100 + '%');
      needle.style.visibility = value === value ? 'visible' : 'hidden';
    }
  };
  const move = (r, c) => at(plots.find((plot) => plot.map), r, c, true);

  const pin = (r, c) => {
    now.pinned = [r, c];
    mark();
    pinBox.replaceChildren();
    const head = make('div', 'lt', pinBox);
    head.append(make('bdi', '', null, called(r, c)));
    make('button', '', head, 'unpin').addEventListener('click', unpin);
    const table = make('table', '', pinBox);
    const values = maps.filter((map) => (map.group || '') === now.group);
    const i = r * cols.n + c;
    values.sort((a, b) => (b.values[i] === b.values[i]) - (a.values[i] === a.values[i]) || b.values[i] - a.values[i]);
    const listed = values.slice(0, 12).map((map) => [map, new Map(facts(map, r, c, true))]);
    const titles = [...new Set(listed.flatMap(([, known]) => [...known.keys()]))];
    const header = make('tr', '', table);
    for (const title of ['', ...titles.map((name) => name || 'value')]) make('th', '', header, title);
    for (const [map, known] of listed) {
      const row = make('tr', '', table);
      make('td', '', row, map.name || map.scale.unit || 'value');
      for (const title of titles) make('td', '', row, known.get(title) || '');
    }
    if (values.length > 12) make('div', 'k', pinBox, `and ${values.length - 12} more maps`);
    lists(pinBox, data.drill && data.drill[called(r, c)]);
  };
  const unpin = () => {
    now.pinned = null;
    pinBox.replaceChildren();
    mark();
  };

  // Each panel holds one map, or several of which one is shown; what can be touched lies over its cells.
  const plots = [...place.querySelectorAll('.tlhm-panel')].map((panel) => {
    const box = over(panel.querySelector('image'), 'plot');
    const plot = { panel, box, maps: maps.filter((map) => panel.contains(map.drawing)), marks: make('div', 'marks', box) };
    box.tabIndex = 0;
    box.setAttribute('role', 'application');
    box.setAttribute('aria-roledescription', 'heat map');
    const cellOf = (event) => {
      const frame = box.getBoundingClientRect();
      const r = flip(Math.floor(((event.clientY - frame.top) / frame.height) * rows.n));
      const c = Math.floor(((event.clientX - frame.left) / frame.width) * cols.n);
      return exists(r, c) ? [r, c] : null;
    };
    box.addEventListener('pointermove', (event) => {
      const cell = cellOf(event);
      if (cell) at(plot, ...cell);
    });
    box.addEventListener('pointerleave', () => speak.hide());
    box.addEventListener('click', (event) => {
      const cell = cellOf(event);
      if (cell) (at(plot, ...cell), pin(...cell));
    });
    box.addEventListener('focus', () => box.matches(':focus-visible') && at(plot, now.r, now.c, true));
    box.addEventListener('blur', () => speak.hide());
    box.addEventListener('keydown', (event) => {
      const up = data.lower ? 1 : -1;
      const step = { ArrowUp: [up, 0], ArrowDown: [-up, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step) {
        let r = clamp(now.r + step[0], 0, rows.n - 1);
        // Rows without cells are stepped over.
        while (step[0] && !filled(r) && r > 0 && r < rows.n - 1) r += step[0];
        if (!filled(r)) r = now.r;
        at(plot, r, clamp(now.c + step[1], 0, (lengths ? lengths[r] : cols.n) - 1), true);
      } else if (event.key === 'Home') at(plot, now.r, 0, true);
      else if (event.key === 'End') at(plot, now.r, (lengths ? lengths[now.r] : cols.n) - 1, true);
      else if (event.key === 'Enter' || event.key === ' ') pin(now.r, now.c);
      else if (event.key === 'Escape') (unpin(), speak.hide());
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    return plot;
  });

  // The highest cells (and the lowest, if the values are signed) as a list that can be clicked.
  const highest = (map) => {
    if (map.scale.names) return;
    const order = Array.from(map.values.keys()).filter((i) => map.scale.signed ? map.values[i] === map.values[i] : map.values[i] > 0);
    order.sort((a, b) => map.values[b] - map.values[a] || a - b);
    const both = map.scale.signed && order.length > 8;
    if (order.length) make('div', 'lt', topBox, both ? 'highest and lowest' : 'highest');
    for (const i of both ? [...order.slice(0, 5), ...order.slice(-5)] : order.slice(0, 8)) {
      const r = Math.floor(i / cols.n), c = i % cols.n;
      const button = make('button', 'top', topBox, called(r, c));
      make('span', 'k', button, ' ' + show(map.values[i], 3));
      button.addEventListener('click', () => pin(r, c));
    }
  };
  const choice = () => {
    for (const plot of plots) {
      plot.map = plot.maps.find((map) => (map.group || '') === now.group && (data.panels || map.name === now.name));
      plot.panel.hidden = !plot.map;
      for (const map of plot.maps) map.drawing.style.display = map === plot.map ? '' : 'none';
      const name = (plot.map && plot.map.name) || root.getAttribute('aria-label');
      plot.box.setAttribute('aria-label', `${name}: arrow keys move, Enter pins, Escape lets go`);
    }
    const shown = plots.map((plot) => plot.map).filter(Boolean);
    for (const bar of place.querySelectorAll('.tlhm-scale')) bar.hidden = !shown.length || bar.dataset.scale !== String(shown[0].scale.number);
    mark();
    if (now.pinned) pin(...now.pinned);
    topBox.replaceChildren();
    if (shown.length === 1 && data.item !== 'pair' && rows.n * cols.n > 1) highest(shown[0]);
  };
  scales.forEach((scale, number) => (scale.number = number));
  choice();
  root.headmap = { maps, now };
};
mount('heat', heat);
