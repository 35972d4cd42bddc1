// Views drawn by circuitsvis. Its script is unpacked once per page, and only what is chosen is drawn.
const script = async () => {
  if (window.CircuitsVis) return window.CircuitsVis;
  const packed = document.querySelector('.tlhm-circuitsvis').textContent;
  const stream = new Blob([bytes(packed)]).stream().pipeThrough(new DecompressionStream('gzip'));
  const node = document.createElement('script');
  node.textContent = (await new Response(stream).text()).replace('var CircuitsVis', 'window.CircuitsVis');
  document.head.append(node);
  return window.CircuitsVis;
};
const circuits = async (root, data) => {
  const place = root.querySelector('.tlhm-draw');
  const { render, ...elements } = await (window.tlhmCircuits ||= script());
  const controls = make('div', 'controls', place);
  const stage = make('div', 'circuits', place);
  const patterns = data.patterns && unpack(data.patterns);
  const props = (number) => {
    if (!patterns) return data.props;
    const n = data.tokens.length, first = number * data.chunk;
    const heads = data.heads.slice(first, first + data.chunk);
    const row = (h, q) => Array.from(patterns.subarray((h * n + q) * n, (h * n + q + 1) * n));
    const attention = heads.map((_, i) => Array.from({ length: n }, (_, q) => row(first + i, q)));
    return [{ attention, tokens: data.tokens, attentionHeadNames: heads, maskUpperTri: data.causal }];
  };
  const draw = (number) => {
    stage.replaceChildren();
    props(number).forEach((one, i) => {
      if (data.titles) make('div', 'k', stage, data.titles[i]);
      const target = make('div', '', stage);
      target.id = 'tlhm-circuits-' + (window.tlhmCount = (window.tlhmCount || 0) + 1);
      render(target.id, elements[data.element], one);
    });
  };
  if (data.names && data.names.length > 1) {
    const select = make('select', '', make('label', '', controls, 'heads '));
    select.setAttribute('aria-label', 'heads');
    data.names.forEach((name, i) => (make('option', '', select, name).value = String(i)));
    select.addEventListener('change', () => draw(Number(select.value)));
    searchBox(controls, 'find L23H4', (text) => {
      const found = data.heads.findIndex((head) => head.toLowerCase() === text.toLowerCase());
      if (found < 0) return text ? 'nothing found' : '';
      select.value = String(Math.floor(found / data.chunk));
      draw(Number(select.value));
      return 'found';
    }, () => {});
  }
  draw(0);
  root.headmap = { patterns };
};
mount('circuits', circuits);
