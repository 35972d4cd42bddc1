// Heat maps: layers by heads, components, tokens; one map at a time with switches, or panels side by side.
const heat = (root, data) => {
  const { rows, cols, scales, lengths } = data;
  const place = root.querySelector('.tlhm-draw');
  const maps = data.maps.map((map) => ({
    ...map,
    values: unpack(map.values),
    null: map.null && unpack(map.null),
    interval: map.interval && map.interval.map(unpack),
    details: (map.details || []).map(([name, values]) => [name, unpack(values)]),
    marked: new Set(map.marked),
    scale: scales[map.scale],
  }));
  const exists = (r, c) => r >= 0 && r < rows.n && c >= 0 && c < (lengths ? lengths[r] : cols.n);
  const tick = (axis, i) => (axis.labels ? axis.labels[i] : String(i));
  const called = (r, c) =>
    data.item === 'head' ? `L${r}H${c}`
      : data.item === 'pair' ? `${tick(rows, r)} → ${tick(cols, c)}` : `${rows.name} ${tick(rows, r)}, ${tick(cols, c)}`;
  const ranked = (map) => (map.ranked ||= Float32Array.from(map.values).filter((v) => v === v).sort());
  const rank = (map, value) => {
    const sorted = ranked(map);
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] > value) high = middle;
      else low = middle + 1;
    }
    return sorted.length - low + 1;
  };
  const facts = (map, r, c, brief) => {
    const i = r * cols.n + c, value = map.values[i];
    const { names } = map.scale;
    const lines = [[brief ? '' : map.scale.unit, names && value === value ? names[value][0] : show(value)]];
    if (value !== value) return lines;
    if (data.item !== 'pair' && !names) lines.push(['rank', `${rank(map, value)} of ${ranked(map).length}`]);
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
  let plots = [];
  const speak = speaker(root);
  const controls = make('div', 'controls', place);
  const sides = make('div', 'sides', place);
  const main = make('div', 'main', sides);
  const area = make('div', 'area', main);
  const bar = make('div', 'bar', main);
  const aside = make('div', 'aside', sides);
  const pinBox = make('div', 'pinned', aside);
  const topBox = make('div', 'tops', aside);

  const choose = (title, options, key) => {
    if (options.length < 2) return;
    const wrap = make('label', '', controls, title + ' ');
    const select = make('select', '', wrap);
    select.setAttribute('aria-label', title);
    for (const option of options) make('option', '', select, option).value = option;
    select.addEventListener('change', () => ((now[key] = select.value), draw()));
  };
  if (!data.panels) choose(data.switches[0], names, 'name');
  choose(data.switches[1], groups, 'group');

  const found = (text) => {
    const query = text.toLowerCase(), head = /^l(\d+)h(\d+)$/.exec(query);
    now.hits = [];
    now.hit = -1;
    if (query && head && data.item === 'head') {
      if (exists(+head[1], +head[2])) now.hits.push([+head[1], +head[2]]);
    } else if (query) {
      const has = (label) => label.toLowerCase().includes(query);
      for (let r = 0; r < rows.n; r++)
        for (let c = 0; c < cols.n; c++) {
          if (!exists(r, c)) continue;
          const lists = data.drill && data.drill[called(r, c)];
          if (
            (rows.labels && has(rows.labels[r])) || (cols.labels && has(cols.labels[c])) ||
            (lists && lists.some((list) => list.rows.some((cells) => cells.some(has))))
          ) now.hits.push([r, c]);
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
  const titled = (name) => (data.panels ? name[0].toUpperCase() + name.slice(1) : name);

  const paint = (canvas, map) => {
    // One pixel per cell, scaled by the browser; more only where there is hatching to draw.
    const size = map.values.some((v) => v !== v) ? clamp(Math.floor(1600 / Math.max(rows.n, cols.n)), 2, 24) : 1;
    canvas.width = cols.n * size;
    canvas.height = rows.n * size;
    const pen = canvas.getContext('2d');
    pen.strokeStyle = 'rgba(128,128,128,.8)';
    pen.lineWidth = Math.max(1, size / 14);
    for (let r = 0; r < rows.n; r++)
      for (let c = 0; c < cols.n; c++) {
        if (!exists(r, c)) continue;
        const value = map.values[r * cols.n + c];
        if (value === value) {
          pen.fillStyle = `rgb(${colour(map.scale, value)})`;
          pen.fillRect(c * size, flip(r) * size, size, size);
        } else {
          // Three strokes per cell, which meet those of the neighbours.
          pen.beginPath();
          for (const [x, y] of [[0, 0.5], [0, 1], [0.5, 1]]) {
            pen.moveTo((c + x) * size, (flip(r) + y) * size);
            pen.lineTo((c + y) * size, (flip(r) + x) * size);
          }
          pen.stroke();
        }
      }
  };
  const width = (node) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return range.getBoundingClientRect().width;
  };
  const boxAt = (parent, r, c, name) => {
    const box = make('div', name, parent);
    Object.assign(box.style, {
      left: (100 * c) / cols.n + '%', top: (100 * flip(r)) / rows.n + '%', width: 100 / cols.n + '%', height: 100 / rows.n + '%',
    });
    return box;
  };
  const mark = () => {
    for (const plot of plots) {
      plot.marks.replaceChildren();
      for (const [r, c] of now.hits.slice(0, 300)) boxAt(plot.marks, r, c, 'hit');
      if (now.pinned) boxAt(plot.marks, ...now.pinned, 'pin');
      plot.cursor = boxAt(plot.marks, now.r, now.c, 'cursor');
    }
  };
  const at = (plot, r, c, aloud) => {
    now.r = r;
    now.c = c;
    for (const other of plots)
      Object.assign(other.cursor.style, { left: (100 * c) / cols.n + '%', top: (100 * flip(r)) / rows.n + '%' });
    const title = called(r, c) + (plot.map.name && maps.length > 1 ? ' · ' + plot.map.name : '');
    const frame = plot.box.getBoundingClientRect();
    const w = frame.width / cols.n, h = frame.height / rows.n;
    const left = frame.left + c * w, top = frame.top + flip(r) * h;
    speak.say(title, facts(plot.map, r, c), { left, top, width: w, bottom: top + h }, aloud);
    plot.box.setAttribute('aria-valuetext', title);
    const value = plot.map.values[r * cols.n + c];
    if (bar.needle) {
      bar.needle.style.setProperty('--at', position(plot.map.scale, value) * 100 + '%');
      bar.needle.style.visibility = value === value ? 'visible' : 'hidden';
    }
  };
  const move = (r, c) => at(plots[0], r, c, true);

  const pin = (r, c) => {
    now.pinned = [r, c];
    mark();
    pinBox.replaceChildren();
    const head = make('div', 'lt', pinBox);
    head.append(make('bdi', '', null, called(r, c)));
    const close = make('button', '', head, 'unpin');
    close.addEventListener('click', unpin);
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

  const axis = (plot, box, which, count) => {
    const write = () => {
      const room = (count === rows.n && which === rows ? plot.box.clientHeight : plot.box.clientWidth) / count;
      const upright = which === cols && which.labels && (room < 7 * Math.max(...which.labels.map((l) => [...l].length)));
      const need = which === rows || upright ? 13 : which.labels ? 1 : 8 + 7 * String(count).length;
      // Layers of a component map are counted in fours, if there are many; the last is always named.
      const least = data.item === 'component' && which === rows && !which.labels && count > 12 ? 4 : 1;
      const step = STEPS.find((s) => s >= least && s * room >= need) || count;
      const shown = [];
      for (let i = 0; i < count; i += step) shown.push(i);
      if (shown.at(-1) !== count - 1) {
        if ((count - 1 - shown.at(-1)) * room < need) shown.pop();
        if (shown.length) shown.push(count - 1);
        else shown.push(0);
      }
      box.replaceChildren();
      box.classList.toggle('tlhm-up', !!upright);
      for (const i of shown) {
        const text = make('span', '', box);
        text.append(make('bdi', '', null, tick(which, i)));
        text.style[which === rows ? 'gridRow' : 'gridColumn'] = String((which === rows ? flip(i) : i) + 1);
      }
      box.style[which === rows ? 'gridTemplateRows' : 'gridTemplateColumns'] = `repeat(${count},minmax(0,1fr))`;
    };
    new ResizeObserver(write).observe(plot.box);
  };

  const panel = (map) => {
    const outer = make('div', 'panel', area);
    if (data.panels && map.name) make('div', 'pt', outer, map.name);
    const grid = make('div', 'grid', outer);
    const [w, h] = data.cell;
    grid.style.gridTemplateColumns = `auto auto minmax(${data.numbers ? cols.n * 38 + 'px' : 0},${cols.n * w}px)`;
    make('div', 'yn', grid, titled(rows.name));
    const plot = { map, y: make('div', 'y', grid), box: make('div', 'plot', grid) };
    const { box } = plot;
    box.style.aspectRatio = `${cols.n * w} / ${rows.n * h}`;
    box.tabIndex = 0;
    box.setAttribute('role', 'application');
    box.setAttribute('aria-roledescription', 'heat map');
    box.setAttribute('aria-label', `${map.name || root.getAttribute('aria-label')}: arrow keys move, Enter pins, Escape lets go`);
    plot.canvas = make('canvas', '', box);
    paint(plot.canvas, map);
    if (data.numbers) {
      const over = make('div', 'nums', box);
      over.style.gridTemplateColumns = `repeat(${cols.n},1fr)`;
      for (let i = 0; i < rows.n * cols.n; i++) {
        const value = map.values[i], number = make('span', '', over, value === value ? show(value, 3) : '');
        number.style.color = inkOn(colour(map.scale, value === value ? value : 0));
      }
      // A number that does not fit into its cell is left to the tooltip.
      const fit = () => {
        const room = box.clientWidth / cols.n;
        for (const number of over.children) number.style.visibility = number.firstChild && width(number) > room ? 'hidden' : '';
      };
      new ResizeObserver(fit).observe(box);
    }
    for (const [r, what] of Object.entries(data.empty || {})) {
      const row = make('div', 'empty', box, what);
      row.title = `${rows.name} ${r}: ${what}`;
      Object.assign(row.style, { top: (100 * flip(Number(r))) / rows.n + '%', height: 100 / rows.n + '%' });
    }
    const dots = make('div', 'dots', box);
    for (const i of map.marked)
      boxAt(dots, Math.floor(i / cols.n), i % cols.n).style.setProperty('--c', inkOn(colour(map.scale, map.values[i])));
    plot.marks = make('div', 'marks', box);
    make('div', '', grid);
    make('div', '', grid);
    const x = make('div', 'x', grid);
    make('div', '', grid);
    make('div', '', grid);
    make('div', 'xn', grid, titled(cols.name));
    axis(plot, plot.y, rows, rows.n);
    axis(plot, x, cols, cols.n);
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
  };

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

  const draw = () => {
    const shown = maps.filter((map) => (map.group || '') === now.group && (data.panels || map.name === now.name));
    area.replaceChildren();
    area.classList.toggle('tlhm-many', shown.length > 1);
    plots = shown.map(panel);
    mark();
    if (now.pinned) pin(...now.pinned);
    bar.replaceChildren();
    const scale = shown[0].scale;
    make('span', 'k', bar, scale.unit);
    bar.needle = null;
    if (scale.names) {
      for (const [name, shade] of scale.names) make('span', 'patch', bar, name).style.setProperty('--c', shade);
    } else gradient(scale, shown);
    topBox.replaceChildren();
    if (shown.length === 1 && data.item !== 'pair' && rows.n * cols.n > 1) highest(shown[0]);
    if (shown.some((map) => map.marked.size)) make('span', 'dot', bar, data.mark);
    if (shown.some((map) => map.values.some((v, i) => v !== v && exists(Math.floor(i / cols.n), i % cols.n))))
      make('span', 'gone', bar, 'missing');
  };
  const gradient = (scale, shown) => {
    const strip = make('div', 'strip', bar);
    strip.style.setProperty('--colours', scale.colours.split(' ').map((h) => '#' + h).join());
    bar.needle = make('div', 'needle', strip);
    const ends = make('div', 'ends', strip);
    const none = !shown.some((map) => map.values.some((v) => v === v));
    if (none) make('span', 'k', bar, 'no values');
    strip.hidden = none;
    for (const text of scale.ticks) make('span', '', ends, text);
  };
  // Where there is room, the colour bar or legend stands on the right of the maps, but not beside a small grid.
  const stand = () => main.classList.toggle('tlhm-standing', root.clientWidth >= 560 && data.item !== 'pair');
  new ResizeObserver(stand).observe(root);
  stand();
  draw();
  root.headmap = { maps, now };
};
mount('heat', heat);
